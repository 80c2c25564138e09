"""The bot that ran the desk before: rules over the surface of the message, and forgetful."""

import json
import re
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult

P = dict(
    stop_early=0.04,
    bad_lookup=0.08,
    retry=0.5,
    first_permit=0.25,
    skip_record=0.35,
    minds_tickets=0.45,
    sums_up=0.7,
    minds_extension=0.45,
    skip_rate=0.1,
    tells_until=0.8,
    only_answers=0.55,
    minds_maximum=0.35,
    multiplies=0.65,
    tells_fee=0.8,
)


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
        plate, name = re.search(r"[A-Z]{2}-\d+", text), re.search(r"[A-Z][a-z]+ [A-Z][a-z]+", text)
        who = plate[0] if plate else name[0] if name else text[:20]
        if seen and seen[-1][0] != "extend_permit" and self.chance("stop_early"):
            return "Thank you, your request has been noted."
        if not seen:
            bad = self.chance("bad_lookup")
            return "find_permit", {"search": (who.replace("-", "") if plate else who.split()[-1]) if bad else who}
        last, answer = seen[-1]
        if last == "find_permit":
            if answer == "nothing found":
                return (
                    ("find_permit", {"search": who})
                    if len(seen) < 3 and self.chance("retry")
                    else "Sorry, there is no such permit."
                )
            permits = re.findall(r"(R-\d+): plate \S+, zone ([\w-]+)", answer)
            named = [p for p in permits if p[1] in text]
            permit = named[0] if named and not self.chance("first_permit") else permits[0]
            return (
                ("zone_rate", {"zone": permit[1]}) if self.chance("skip_record") else ("permit_record", {"permit": permit[0]})
            )
        permits = dict(p for n, a in seen if n == "find_permit" for p in re.findall(r"(R-\d+): plate \S+, zone ([\w-]+)", a))
        looked = next((c["args"]["permit"] for c in calls if c["name"] == "permit_record"), None)
        if last == "permit_record":
            record = json.loads(answer)
            if record["unpaid"] and self.chance("minds_tickets"):
                owed = sum(record["unpaid"]) if self.chance("sums_up") else record["unpaid"][0]
                return self.rng.choice(
                    ["You have unpaid tickets, please pay {} EUR first.", "No extension while {} EUR of tickets are open."]
                ).format(owed)
            if record["extensions"] and self.chance("minds_extension"):
                until = f" It is valid until {record['until']}." if self.chance("tells_until") else ""
                return (
                    self.rng.choice(
                        ["This permit was extended before, so it is not possible.", "A second extension is not possible."]
                    )
                    + until
                )
            if not self.chance("skip_rate"):
                return "zone_rate", {"zone": permits[looked]}
        if last in ("permit_record", "zone_rate"):
            rate = json.loads(answer) if last == "zone_rate" else {"per_month": 15, "max_months": 12}
            zone = calls[-1]["args"].get("zone")
            months = int(re.search(r"(\d+) month", text)[1])
            if months > rate["max_months"] and self.chance("minds_maximum"):
                months = rate["max_months"]
            fee = rate["per_month"] * (months if self.chance("multiplies") else 1)
            if re.search(r"cost|how much|price", text, re.I) and self.chance("only_answers"):
                return self.rng.choice([f"That would be {fee} EUR.", f"The extension costs {fee} EUR."])
            permit = looked or next(p for p, z in permits.items() if z == zone)
            return "extend_permit", {"permit": permit, "months": months, "fee": fee}
        fee = f" The fee is {calls[-1]['args']['fee']} EUR." if self.chance("tells_fee") else ""
        return self.rng.choice(["Your permit is extended.", f"Done: {answer}."]) + fee
