"""The library's rules, applied to loans and readers that no log looked up and that `Imputed` gives a recorded state.

The desk's check compares with what is right in its own database. In another state something else is right: the rules of the
desk's `world.py` say what.
"""

import json
import re
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from glue import Desk

from dreamgym_lg import Dream, ReplayBuffer, Step, Task, Verify
from dreamgym_lg.compiled import Compiled, Imputed
from dreamgym_lg.dream import TraceIndex


def imputed_dream(desk: Desk, dream: Dream, buffer: ReplayBuffer, seed: int) -> Dream:
    """The dream, with `Imputed` before recorded answers, and a check that knows its states in place of the last judge."""
    index = TraceIndex(buffer, tools=desk.agent.make_tools(desk.master), writes=["serve", "reserve", "hand_over"])
    imputed = Imputed(Compiled(desk.out / "world"), index, seed=seed)

    def check(task: Task, steps: Sequence[Step]) -> float | None:
        if task.instruction not in desk.cases or not any(step.decided_by == imputed.name for step in steps):
            return desk.check_steps(task, steps)
        loans, readers = rows(imputed.documents(task))
        case = right_case(desk, desk.cases[task.instruction], loans, readers)
        if case is None:  # the request speaks of more loans than the reader now has
            return 0.0
        with tempfile.TemporaryDirectory(prefix="library-") as folder:
            master = desk.world.episode_db(desk.master, Path(folder) / "master.db")
            with closing(sqlite3.connect(master)) as connection, connection:
                connection.executemany("INSERT OR REPLACE INTO loans VALUES (?, ?, ?, ?)", loans.values())
                connection.executemany("INSERT OR REPLACE INTO readers VALUES (?, '', ?)", readers.items())
            return desk.check_steps(task, steps, case=case, master=master)

    schemas, *others = dream.responders
    return Dream([schemas, imputed, *others], None, [*dream.judges[:-1], Verify(check)])


def rows(documents: Sequence[Sequence[Any]]) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Loans as rows of the database, and readers' cards, by their numbers."""
    looked_up = [(*arguments.values(), json.loads(answer)) for _, arguments, answer in documents]
    loans = {number: (number, row["reader"], row["kind"], row["state"]) for number, row in looked_up if "kind" in row}
    return loans, {number: row["card"] for number, row in looked_up if "card" in row}


def right_case(
    desk: Desk, case: dict[str, Any], loans: dict[str, tuple[str, ...]], readers: dict[str, str]
) -> dict[str, Any] | None:
    """The case with what is right in this state; None where the state does not fit its request."""
    numbers, asker = (re.findall(rf"\b{letter}\d{{4}}\b", case["instruction"]) for letter in "LR")
    jobs = _jobs(desk, case)
    meant = [loans[number] for number in numbers if number in loans]
    meant = meant if numbers else [loan for loan in loans.values() if loan[1] in asker]
    if len(meant) != max(len(jobs), int(case["field"] in ("kind", "state"))) and case["field"] != "card":
        return None
    card = readers.get(asker[0], "") if asker else ""
    writes = [desk.world.right_row(job, loan, card, *asker or [""]) for job, loan in zip(jobs, meant, strict=False)]
    facts = {"card": card, **(dict(zip(("kind", "state"), meant[0][2:], strict=True)) if meant else {})}
    return {**case, "writes": writes, "fact": facts.get(case["field"])}


def _jobs(desk: Desk, case: dict[str, Any]) -> list[str]:
    """What is to be done with each loan, by the wording of the request."""
    if case["kind"] != "two_loans":
        return [] if case["kind"] == "question" else [case["kind"]]
    for what, wordings in desk.world.REQUESTS.items():
        for wording in wordings.replace("\n", " ").split("|"):
            pattern = re.sub(r"\\\{\w+\\\}", ".+", re.escape(wording.strip()))
            if what.startswith("two_loans/") and re.search(pattern, case["instruction"], re.IGNORECASE):
                return what.partition("/")[2].split()
    raise ValueError(f"no wording of world.py fits {case['instruction']!r}")
