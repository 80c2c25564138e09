"""The bot that ran the desk before: rules over the surface of the message, and forgetful."""

import json
import re
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult

WORDS = {
    "renew": "renew|extend|prolong|longer|more time", "return": "post|mail|parcel",
    "reserve": "reserve|in line|hold|queue|waiting list",
}  # fmt: skip
SERVICES = "renew label pickup".split()
REASONS = "lost overdue blocked child".split()
P = dict(
    at_once=0.16, skip_loan=0.16, skip_card=0.35, wrong_id=0.16, forgets_second=0.05, tells_fact=0.5, wrong_fact=0.35,
    knows_lost=0.36, knows_overdue=0.4, knows_reserved=0.36, knows_map=0.38, knows_blocked=0.4, knows_child=0.4, mixes_up=0.2,
)  # fmt: skip


def wanted(text):
    """Jobs in the order in which the message asks for them; none for a question."""
    hits = sorted((m.start(), job) for job, words in WORDS.items() for m in re.finditer(words, text.lower()))
    jobs = [job for _, job in hits]
    return [job for i, job in enumerate(jobs) if i == 0 or jobs[i - 1] != job]


def asked_field(text):
    if "card" in text:
        return "card"
    return "kind" if re.search("kind|sort|type", text) else "state"


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
        calls = [c for m in messages if isinstance(m, AIMessage) for c in m.tool_calls]
        seen = [json.loads(m.content) for m in messages if isinstance(m, ToolMessage)]
        facts = {next(iter(c["args"].values())): s for c, s in zip(calls, seen) if c["name"].startswith("get_")}
        done = [c["args"]["loan"] for c in calls if not c["name"].startswith("get_")]
        loans, readers = re.findall(r"L\d{4}", text), re.findall(r"R\d{4}", text)
        if not calls and loans and self.chance("at_once"):
            return "hand_over", {"loan": loans[0], "reason": self.rng.choice(REASONS)}
        if not loans and readers[0] not in facts:
            return "get_reader", {"reader": readers[0]}
        loans = loans or facts[readers[0]]["loans"]
        jobs = wanted(text)
        if not jobs:
            return self.answer(asked_field(text), loans[0], facts, done)
        left = [(loan, jobs[min(i, len(jobs) - 1)]) for i, loan in enumerate(loans) if loan not in done]
        if not left or (done and (self.chance("forgets_second") or calls[-1]["name"] == "hand_over" and len(calls) == 1)):
            return self.rng.choice(["All done, enjoy your day.", "Done, I took care of it.", "Your request is settled."])
        return self.work(*left[0], loans, facts, readers)

    def answer(self, field, loan, facts, done):
        if done:
            return "A librarian will answer your question."
        if field != "card" and loan not in facts:
            return "get_loan", {"loan": loan}
        known = {k: v for f in facts.values() for k, v in f.items() if k in ("kind", "state", "card")}
        if not self.chance("tells_fact"):
            return self.rng.choice(["I looked it up and all is fine.", "It is noted in our system."])
        value = known[field]
        if self.chance("wrong_fact"):
            field, value = self.rng.choice(list(known.items()))
        return f"The {field} is {value}."

    def work(self, loan, job, loans, facts, readers):
        if loan not in facts and not self.chance("skip_loan"):
            return "get_loan", {"loan": loan}
        if job == "reserve" and readers[0] not in facts and not self.chance("skip_card"):
            return "get_reader", {"reader": readers[0]}
        return self.write(loan, job, loans, facts, readers)

    def write(self, loan, job, loans, facts, readers):
        kind, state = (facts.get(loan, {}).get(f, "") for f in ("kind", "state"))
        if state == "lost" and self.chance("knows_lost"):
            return "hand_over", {"loan": loan, "reason": "lost"}
        if job == "reserve":
            return self.reserve(loan, kind, facts, readers[0])
        if job == "renew" and state == "overdue" and self.chance("knows_overdue"):
            return "hand_over", {"loan": loan, "reason": "overdue"}
        if len(loans) > 1 and self.chance("wrong_id"):
            loan = self.rng.choice(loans)
        if self.chance("mixes_up"):
            return "serve", {"loan": loan, "service": self.rng.choice(SERVICES)}
        if job == "renew" and not (state == "reserved" and self.chance("knows_reserved")):
            return "serve", {"loan": loan, "service": "renew"}
        return "serve", {"loan": loan, "service": "pickup" if kind == "map" and self.chance("knows_map") else "label"}

    def reserve(self, loan, kind, facts, reader):
        card = facts.get(reader, {}).get("card")
        if card == "blocked" and self.chance("knows_blocked"):
            return "hand_over", {"loan": loan, "reason": "blocked"}
        if card == "child" and kind == "film" and self.chance("knows_child"):
            return "hand_over", {"loan": loan, "reason": "child"}
        if loan in facts and self.chance("wrong_id"):
            reader = facts[loan]["reader"]
        return "reserve", {"loan": loan, "reader": reader}
