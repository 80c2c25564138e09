"""The bot that ran the desk before: rules over the surface of the message, and forgetful."""

import json
import re
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult

MONTHS = {"march": 3, "april": 4}
P = dict(
    stop_early=0.04,
    bad_lookup=0.08,
    retry=0.5,
    first_visit=0.25,
    skip_visit=0.35,
    knows_late=0.5,
    gives_phone=0.8,
    minds_day=0.6,
    knows_waitlist=0.5,
    knows_fee=0.5,
    charges_anyway=0.15,
    guesses_no_fee=0.7,
    tells_day=0.85,
    tells_fee=0.8,
)


def wished_day(text):
    if m := re.search(r"\d{4}-\d\d-\d\d", text):
        return m[0]
    if m := re.search(r"(\d+) (March|April)|(March|April) (\d+)", text):
        return f"2026-{MONTHS[(m[2] or m[3]).lower()]:02d}-{int(m[1] or m[4]):02d}"
    return ""


class Predecessor(BaseChatModel):
    rng: Any = None

    @property
    def _llm_type(self):
        return "predecessor"

    def bind_tools(self, tools, **kwargs):
        return self

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        out = self.decide(messages)
        if isinstance(out, str):
            msg = AIMessage(out)
        else:
            call_id = f"call_{self.rng.getrandbits(32):08x}"
            msg = AIMessage("", tool_calls=[{"name": out[0], "args": out[1], "id": call_id}])
        return ChatResult(generations=[ChatGeneration(message=msg)])

    def chance(self, name):
        return self.rng.random() < P[name]

    def decide(self, messages):
        text = next(m.content for m in messages if isinstance(m, HumanMessage))
        seen = [(m.name, m.content) for m in messages if isinstance(m, ToolMessage)]
        calls = [c for m in messages if isinstance(m, AIMessage) for c in m.tool_calls]
        number, name = re.search(r"P-\d+", text), re.search(r"[A-Z][a-z]+ [A-Z][a-z]+", text)
        who = number[0] if number else name[0] if name else text[:20]
        if seen and seen[-1][0] != "move_visit" and self.chance("stop_early"):
            return "I will look into your visit and get back to you."
        if not seen:
            bad = self.chance("bad_lookup")
            return "find_visits", {"patient": (who[2:] if number else who.split()[-1]) if bad else who}
        last, answer = seen[-1]
        if last == "find_visits":
            if answer == "no such patient":
                return (
                    ("find_visits", {"patient": who})
                    if len(seen) < 3 and self.chance("retry")
                    else "Sorry, I cannot find you in our system."
                )
            visits = re.findall(r"(V-\d+) with (\w+)", answer)
            named = [v for v in visits if v[1] in text]
            visit = named[0] if named and not self.chance("first_visit") else visits[0]
            if self.chance("skip_visit"):
                return "free_slots", {"therapist": visit[1]}
            return "get_visit", {"visit_id": visit[0]}
        visit = next((json.loads(a) for n, a in seen if n == "get_visit"), None)
        if last == "get_visit":
            if visit["days_away"] < 2 and self.chance("knows_late"):
                return self.rng.choice(["It is too late to change this visit here", "This visit is too soon to be moved"]) + (
                    f", please call {visit['phone']}." if self.chance("gives_phone") else "."
                )
            return "free_slots", {"therapist": visit["therapist"]}
        if last == "free_slots":
            slots, day = answer.split("; "), wished_day(text) if self.chance("minds_day") else ""
            therapist = calls[-1]["args"]["therapist"]
            visit_id = (
                visit["visit"]
                if visit
                else next(
                    v for n, a in seen if n == "find_visits" for v, t in re.findall(r"(V-\d+) with (\w+)", a) if t == therapist
                )
            )
            fit = [s for s in slots if s[:10] >= day]
            if not fit:
                if self.chance("knows_waitlist"):
                    return "move_visit", {"visit_id": visit_id, "slot": "waitlist", "fee": 0}
                if self.rng.random() < 0.5:
                    return f"{therapist} has no free slot then, sorry."
                fit = slots[-1:]
            if visit is None:
                fee = 0 if self.chance("guesses_no_fee") else 35
            elif visit["days_away"] < 7:
                fee = 35 if self.chance("knows_fee") else 0
            else:
                fee = 35 if self.chance("charges_anyway") else 0
            return "move_visit", {"visit_id": visit_id, "slot": fit[0], "fee": fee}
        args = calls[-1]["args"]
        if args["slot"] == "waitlist":
            return "There is no free slot, so I put you on the waitlist."
        when = f" to {args['slot']}" if self.chance("tells_day") else ""
        fee = f" The fee is {args['fee']} EUR." if self.chance("tells_fee") else ""
        return self.rng.choice(["Your visit is moved", "Done, I moved your visit"]) + when + "." + fee
