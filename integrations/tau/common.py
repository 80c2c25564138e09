"""Parts of both domains' tools: records, refusals, and the tools that both have."""

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

Record = dict[str, Any]
Database = Mapping[str, dict[str, Any]]
"""Table -> id -> record. Databases of one domain share the records that neither has changed."""
Tool = Callable[..., Any]
"""(database, the schema's arguments) -> a text, or what `json.dumps` makes one of. Raises for what it refuses."""


class Refused(Exception):
    """A tool's refusal; the agent reads it behind `Error: `."""


def find(database: Database, table: str, id: str, otherwise: str) -> Record:
    """A record to read. Raises `Refused` with the words of `otherwise`."""
    if id not in database[table]:
        raise Refused(otherwise)
    return database[table][id]


def writable(database: Database, table: str, id: str) -> Record:
    """A record to write, from now on this database's alone."""
    database[table][id] = deepcopy(database[table][id])
    return database[table][id]


def get_user_details(database: Database, user_id: str) -> Record:
    return find(database, "users", user_id, "user not found")


def calculate(database: Database, expression: str) -> str:
    if not all(character in "0123456789+-*/(). " for character in expression):
        raise Refused("invalid characters in expression")
    if "**" in expression:  # powers of whole numbers may be too long for any memory; of floats they overflow
        expression = re.sub(r"(?<![\d.])\d+(?![\d.])", r"\g<0>.0", expression)
    return str(round(float(eval(expression, {"__builtins__": None}, {})), 2))  # digits and operators alone


def think(database: Database, thought: str) -> str:
    return ""


def transfer_to_human_agents(database: Database, summary: str) -> str:
    return "Transfer successful"


SHARED: tuple[Tool, ...] = (calculate, get_user_details, think, transfer_to_human_agents)
