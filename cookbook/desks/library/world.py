"""The library's database, its tasks and the check."""

import random
import re
import shutil
import sqlite3
from contextlib import closing
from functools import lru_cache
from pathlib import Path

SEED = 23
SIZES = {"train": 600, "validation": 60, "test": 150}
KINDS = "renew return reserve question two_loans".split()
FIELDS = {"kind": "book film map".split(), "state": "open reserved overdue lost".split(), "card": "adult child blocked".split()}
COLUMNS = {
    "readers": "id name card", "loans": "id reader kind state",
    "services": "loan service", "reservations": "loan reader", "handovers": "loan reason",
}  # fmt: skip
FIRST = """Agnes Basil Cora Denis Elsie Frank Gwen Hugo Iris Jasper Kitty Leon Mabel Nigel Olive Percy Rhoda Silas Thea Uma
Victor Wanda Yusuf Zelda Anwar Bianca Cyril Dora Emil Flora Gideon Hattie Imran Joyce Keith Lydia Murat Nell Otis Petra""".split()
LAST = """Abbey Barlow Croft Dunne Ellwood Frith Garland Heath Ingram Jessop Kershaw Lowe Marsh Naylor Orchard Pike Quill
Rudge Swann Tanner Upton Venn Wicks Yardley Ashby Bright Cobb Dale Eames Fenn Gale Hobbs""".split()
OPENINGS = "Hello.|Good morning!|Dear library,|Hi there.|Sorry to bother you.|Good afternoon,|A small thing today:".split("|")
CLOSINGS = [f"{c} {{name}}" for c in "Thanks,|Best wishes,|Bye!|Many thanks!|Kind regards,|Yours,|Cheers,".split("|")]

# Request wordings by what is asked; in a pair the first job is done to the first loan, the second to the second.
REQUESTS = {
    "renew": """Could you renew {a}?|Please extend {a}.|I would like to have {a} for longer, can that be done?
|May I get more time for {a}?|{a} needs to be renewed, please.|I have not finished yet, so please prolong {a}.
|Is it possible to extend {a} a bit?""",
    "return": """I want to send back {a} by post.|Can {a} go back by mail? I cannot come in.
|How do I mail back {a}? Please arrange it.|Please arrange a return by post for {a}.
|{a} has to come back to you by parcel, please help.|I am ill at home and want to return {a} by mail.
|I moved away and need to post {a} back to you.""",
    "reserve": """I am {me}, please reserve what is out on {a}.|Could you put {me} in line for the item on {a}?
|{a} is what I want to have next, please reserve it for {me}.|Please place a hold on {a} for {me}.
|The catalogue says {a} is out, so I, {me}, want to be in the queue for it.
|May I have {a} after the present reader? Hold it for {me}.|Put {me} on the waiting list for {a}, please.""",
    "question/kind": """What kind of item is {a}?|I forgot what sort of thing {a} is, can you tell me?
|Which type of item is it on {a}?|Tell me what kind of item I find under {a}, please.""",
    "question/state": """What is the state of {a}?|How do things stand with {a}?
|Can you tell me the present status of {a}?|I only want to know which state {a} is in.""",
    "question/card": """What kind of card does {me} have?|Which card is on file for {me}?
|I am {me} and wonder how my card is listed.|Please tell me the status of the card of {me}.""",
    "two_loans/renew return": """Please renew {a} and let me send back {b} by post.
|{a} should be extended, and {b} goes back by mail.
|I need more time for {a}, while {b} has to return to you by post.""",
    "two_loans/return renew": """I want to mail back {a} but have {b} for longer.
|Arrange a return by post for {a} and extend {b}, please.|{a} comes back by parcel, {b} should be renewed.""",
    "two_loans/renew renew": "Please renew {both}.|Can you extend {both}?|I need more time for {both}.",
    "two_loans/return return": """I want to send back {both} by post.|Can {both} go back by mail?
|Please arrange a parcel return for {both}.""",
}


def _wordings(rng):
    """By split and kind: (what, sentence), where no combination of opening, request and closing is in two splits."""
    out = {split: {} for split in SIZES}
    for kind in KINDS:
        asks = [(k, r) for k, text in REQUESTS.items() if k.split("/")[0] == kind for r in text.replace("\n", " ").split("|")]
        combos = [(k, f"{o} {r.strip()} {c}") for k, r in asks for o in OPENINGS for c in CLOSINGS]
        rng.shuffle(combos)
        for split, size in SIZES.items():
            out[split][kind] = [combos.pop() for _ in range(size // len(KINDS))]
    return out


def right_row(job, loan, card, asker):
    """Table and row that the right call writes for one loan."""
    number, _, kind, state = loan
    if state == "lost":
        return "handovers", (number, "lost")
    if job == "reserve":
        if card == "blocked" or (card == "child" and kind == "film"):
            return "handovers", (number, card)
        return "reservations", (number, asker)
    if job == "renew" and state in ("open", "overdue"):
        return ("services", (number, "renew")) if state == "open" else ("handovers", (number, "overdue"))
    return "services", (number, "pickup" if kind == "map" else "label")


class _Maker:
    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.names = self.rng.sample([f"{a} {b}" for a in FIRST for b in LAST], len(FIRST) * len(LAST))
        self.numbers = {c: [f"{c}{n}" for n in self.rng.sample(range(1000, 10000), 2000)] for c in "LR"}
        self.rows = {t: [] for t in COLUMNS}

    def reader(self):
        row = (self.numbers["R"].pop(), self.names.pop(), self.rng.choice(FIELDS["card"]))
        self.rows["readers"].append(row)
        return row

    def loan(self, reader):
        row = (self.numbers["L"].pop(), reader[0], self.rng.choice(FIELDS["kind"]), self.rng.choice(FIELDS["state"]))
        self.rows["loans"].append(row)
        return row

    def fill(self, wording, loans, reader):
        """By loan number or, half of the time where both are enough, by the reader's number."""
        me, by_reader = f"reader {reader[0]}", self.rng.random() < 0.5 and "{me}" not in wording
        a, b = ("loan " + loan[0] for loan in (loans * 2)[:2])
        if by_reader and len(loans) == 1:
            a = self.rng.choice(["my loan ({})", "the only loan of {}"]).format(me)
        both = f"{a} and {b}"
        if by_reader and len(loans) == 2:
            both = self.rng.choice(["both my loans ({})", "the two loans of {}"]).format(me)
        text = wording.format(a=a, b=b, both=both, me=me, name=reader[1])
        return re.sub(r"(^|[.!?] )([a-z])", lambda m: m[1] + m[2].upper(), text)

    def task(self, kind, what, wording):
        reader = self.reader()
        mine = [self.loan(reader) for _ in range(1 + (kind == "two_loans"))]
        loans = [self.loan(self.reader())] if kind == "reserve" else mine
        detail = what.partition("/")[2]
        facts = {"card": reader[2], "kind": loans[0][2], "state": loans[0][3]}
        jobs = [] if kind == "question" else detail.split() or [kind]
        return {
            "kind": kind,
            "instruction": self.fill(wording, loans, reader),
            "writes": [right_row(job, loan, reader[2], reader[0]) for job, loan in zip(jobs, loans)],
            "field": detail if kind == "question" else None,
            "fact": facts.get(detail),
        }


@lru_cache
def world(seed=SEED):
    """All rows by table and all tasks by split; no reader, loan or wording is in two splits."""
    make, tasks = _Maker(seed), {}
    for split, kinds in _wordings(make.rng).items():
        plan = [(kind, *combo) for kind, combos in kinds.items() for combo in combos]
        make.rng.shuffle(plan)
        tasks[split] = [{"id": f"library-{split}-{i:03d}", **make.task(*p)} for i, p in enumerate(plan)]
    return {t: sorted(rows) for t, rows in make.rows.items()}, tasks


def make_tasks(split, seed=SEED):
    return world(seed)[1][split]


def reset(db_path, seed=SEED):
    """Write the database as it is before any episode."""
    Path(db_path).unlink(missing_ok=True)
    with closing(sqlite3.connect(db_path)) as con, con:
        for table, rows in world(seed)[0].items():
            columns = COLUMNS[table].split()
            con.execute(f"CREATE TABLE {table} ({', '.join(c + ' TEXT' + ' PRIMARY KEY' * (c == 'id') for c in columns)})")
            con.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", rows)


def episode_db(master, path):
    """One episode works on its own copy."""
    shutil.copyfile(master, path)
    return path


def _dump(path):
    with closing(sqlite3.connect(path)) as con:
        return {t: sorted(con.execute(f"SELECT * FROM {t}")) for t in COLUMNS}


def named(text, field):
    return {v for v in FIELDS[field] if re.search(rf"\b{v}s?\b", text, re.I)}


def check(task, db_before, db_after, final_message):
    """1.0 if exactly the right rows were written and a question got its fact and no other value, else 0.0."""
    want = _dump(db_before)
    for table, row in task["writes"]:
        want[table] = sorted([*want[table], tuple(row)])
    if want != _dump(db_after):
        return 0.0
    return float(task["field"] is None or named(final_message or "", task["field"]) == {task["fact"]})
