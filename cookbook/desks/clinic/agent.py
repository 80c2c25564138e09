"""Front desk of Linden Physio: moves visits. LangChain create_agent over SQLite."""

import json
import sqlite3
from contextlib import closing
from datetime import date

from langchain.agents import create_agent
from langchain_core.tools import tool

TODAY = date(2026, 3, 9)

SYSTEM = """You move visits for Linden Physio.
A visit less than 2 days away is never changed: give the phone to call.
Else move it to the earliest free slot of its therapist on or after the wished day. No such slot: use slot "waitlist", fee 0.
Fee: 35 if the visit is less than 7 days away, else 0.
End by telling the new day and fee."""


def make_tools(db_path):
    def query(sql, *args):
        with closing(sqlite3.connect(db_path)) as con, con:
            con.execute("PRAGMA synchronous = OFF")
            return con.execute(sql, args).fetchall()

    @tool
    def find_visits(patient: str) -> str:
        """Visits by patient number or name."""
        rows = query(
            "SELECT v.id, v.therapist FROM visits v JOIN patients p ON p.id = v.patient_id "
            "WHERE p.id = ?1 OR p.name = ?1 COLLATE NOCASE ORDER BY v.id",
            patient.strip(),
        )
        return "; ".join(f"{v} with {t}" for v, t in rows) or "no such patient"

    @tool
    def get_visit(visit_id: str) -> str:
        """Day of a visit."""
        rows = query(
            "SELECT v.therapist, v.day, t.phone FROM visits v JOIN therapists t ON t.name = v.therapist WHERE v.id = ?",
            visit_id.strip(),
        )
        if not rows:
            return "no such visit"
        therapist, day, phone = rows[0]
        return json.dumps(
            {
                "visit": visit_id,
                "therapist": therapist,
                "day": day,
                "days_away": (date.fromisoformat(day) - TODAY).days,
                "phone": phone,
            }
        )

    @tool
    def free_slots(therapist: str) -> str:
        """Free slots."""
        rows = query("SELECT day, time FROM slots WHERE therapist = ? AND free = 1 ORDER BY day, time", therapist.strip())
        return "; ".join(f"{d} {t}" for d, t in rows) or "none"

    @tool
    def move_visit(visit_id: str, slot: str, fee: int) -> str:
        """Move a visit."""
        rows = query("SELECT therapist FROM visits WHERE id = ?", visit_id)
        if not rows:
            return "no such visit"
        if slot == "waitlist":
            query("INSERT OR REPLACE INTO waitlist VALUES (?, ?)", visit_id, fee)
            return f"{visit_id} is on the waitlist"
        day, _, time = slot.partition(" ")
        if not query("SELECT 1 FROM slots WHERE therapist = ? AND day = ? AND time = ? AND free = 1", rows[0][0], day, time):
            return "error: not a free slot of this therapist"
        query("UPDATE slots SET free = 0 WHERE therapist = ? AND day = ? AND time = ?", rows[0][0], day, time)
        query("UPDATE visits SET day = ?, time = ?, fee = fee + ? WHERE id = ?", day, time, fee, visit_id)
        return f"{visit_id} moved to {slot}, fee {fee}"

    return [find_visits, get_visit, free_slots, move_visit]


def build(model, db_path):
    return create_agent(model, make_tools(db_path), system_prompt=SYSTEM)
