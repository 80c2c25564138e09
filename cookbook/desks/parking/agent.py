"""Desk of a town's parking office: extends resident permits. A hand-written LangGraph over SQLite."""

import calendar
import json
import sqlite3
from contextlib import closing
from datetime import date
from typing import Annotated, TypedDict

from langchain_core.messages import SystemMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

SYSTEM = """You extend parking permits.
Unpaid tickets: do not extend, tell the total owed.
Permit extended before: say "not possible" and its "until" day.
Months above the zone's maximum: extend by the maximum.
Fee = months x monthly rate. Only the price asked: extend nothing.
End by telling the fee."""


def add_months(day, months):
    d = date.fromisoformat(day)
    year, month = divmod(d.year * 12 + d.month - 1 + months, 12)
    return date(year, month + 1, min(d.day, calendar.monthrange(year, month + 1)[1])).isoformat()


def make_tools(db_path):
    def query(sql, *args):
        with closing(sqlite3.connect(db_path)) as con, con:
            con.execute("PRAGMA synchronous = OFF")
            return con.execute(sql, args).fetchall()

    @tool
    def find_permit(search: str) -> str:
        """Permits by holder or plate."""
        rows = query(
            "SELECT id, plate, zone FROM permits WHERE plate = ?1 COLLATE NOCASE OR holder = ?1 COLLATE NOCASE ORDER BY id",
            search.strip(),
        )
        return "; ".join(f"{i}: plate {p}, zone {z}" for i, p, z in rows) or "nothing found"

    @tool
    def permit_record(permit: str) -> str:
        """Extensions, unpaid tickets."""
        rows = query("SELECT until, extensions FROM permits WHERE id = ?", permit.strip())
        if not rows:
            return "no such permit"
        unpaid = query("SELECT amount FROM tickets WHERE permit_id = ? AND paid = 0 ORDER BY id", permit.strip())
        return json.dumps({"until": rows[0][0], "extensions": rows[0][1], "unpaid": [a for (a,) in unpaid]})

    @tool
    def zone_rate(zone: str) -> str:
        """Rate and maximum."""
        rows = query("SELECT rate, max_months FROM zones WHERE name = ?", zone.strip())
        return json.dumps({"per_month": rows[0][0], "max_months": rows[0][1]}) if rows else "no such zone"

    @tool
    def extend_permit(permit: str, months: int, fee: int) -> str:
        """Extend a permit."""
        rows = query("SELECT until FROM permits WHERE id = ?", permit)
        if not rows or months < 1:
            return "error: no such permit" if not rows else "error: months"
        until = add_months(rows[0][0], months)
        query("UPDATE permits SET until = ?, extensions = extensions + 1, fees = fees + ? WHERE id = ?", until, fee, permit)
        return f"{permit} extended until {until}"

    return [find_permit, permit_record, zone_rate, extend_permit]


class State(TypedDict):
    messages: Annotated[list, add_messages]


def build(model, db_path):
    tools = {t.name: t for t in make_tools(db_path)}
    bound = model.bind_tools(list(tools.values()))

    def clerk(state: State):
        return {"messages": [bound.invoke([SystemMessage(SYSTEM), *state["messages"]])]}

    def act(state: State):
        answers = []
        for call in state["messages"][-1].tool_calls:
            try:
                text = tools[call["name"]].invoke(call["args"])
            except Exception as err:  # unknown tool, bad arguments: let the model see it
                text = f"error: {type(err).__name__}"
            answers.append(ToolMessage(text, tool_call_id=call["id"], name=call["name"]))
        return {"messages": answers}

    graph = StateGraph(State)
    graph.add_node("clerk", clerk)
    graph.add_node("act", act)
    graph.add_edge(START, "clerk")
    graph.add_conditional_edges("clerk", lambda s: "act" if s["messages"][-1].tool_calls else END, ["act", END])
    graph.add_edge("act", "clerk")
    return graph.compile()
