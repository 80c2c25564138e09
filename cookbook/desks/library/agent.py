"""Loan desk of Aldwick town library: renewals, returns by mail, reservations. LangChain create_agent over SQLite."""

import json
import sqlite3
from contextlib import closing
from typing import Literal

from langchain.agents import create_agent
from langchain_core.tools import tool

SYSTEM = """You run a town library's loan desk. Look numbers up before acting.
Question: change nothing, name the fact.
Otherwise, lost loan: hand over as lost.
Renew: open: serve renew. Overdue: hand over as overdue. Reserved: treat as return.
Return: map: serve pickup, others: serve label.
Reserve: blocked card: hand over as blocked. Child card and film: hand over as child. Else reserve.
End with one short sentence."""


def make_tools(db_path):
    def query(sql, *args):
        with closing(sqlite3.connect(db_path)) as con, con:
            con.execute("PRAGMA synchronous = OFF")
            return con.execute(sql, args).fetchall()

    def short(**fields):
        return json.dumps(fields, separators=(",", ":"))

    def known(table, number):
        return bool(query(f"SELECT 1 FROM {table} WHERE id = ?", number))

    @tool
    def get_loan(loan: str) -> str:
        """Kind, state and reader of a loan."""
        rows = query("SELECT kind, state, reader FROM loans WHERE id = ?", loan.strip())
        return short(**dict(zip("kind state reader".split(), rows[0]))) if rows else short(error="no such loan")

    @tool
    def get_reader(reader: str) -> str:
        """Card and loans of a reader."""
        rows = query("SELECT card FROM readers WHERE id = ?", reader.strip())
        loans = query("SELECT id FROM loans WHERE reader = ? ORDER BY id", reader.strip())
        return short(card=rows[0][0], loans=[x for (x,) in loans]) if rows else short(error="no such reader")

    @tool
    def serve(loan: str, service: Literal["renew", "label", "pickup"]) -> str:
        """Renew a loan, mail a return label or send a pickup."""
        if not known("loans", loan):
            return short(error="no such loan")
        query("INSERT INTO services VALUES (?, ?)", loan, service)
        return short(loan=loan, done=service)

    @tool
    def reserve(loan: str, reader: str) -> str:
        """Reserve a loaned item for a reader."""
        if not (known("loans", loan) and known("readers", reader)):
            return short(error="no such number")
        query("INSERT INTO reservations VALUES (?, ?)", loan, reader)
        return short(loan=loan, done="reserved")

    @tool
    def hand_over(loan: str, reason: Literal["lost", "overdue", "blocked", "child"]) -> str:
        """Leave a loan to a librarian."""
        if not known("loans", loan):
            return short(error="no such loan")
        query("INSERT INTO handovers VALUES (?, ?)", loan, reason)
        return short(loan=loan, done="handed over")

    return [get_loan, get_reader, serve, reserve, hand_over]


def build(model, db_path):
    return create_agent(model, make_tools(db_path), system_prompt=SYSTEM)
