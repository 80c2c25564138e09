"""The parking office's database, its tasks and the check."""

import random
import re
import shutil
import sqlite3
from contextlib import closing
from datetime import date, timedelta
from functools import lru_cache
from pathlib import Path

from agent import add_months

SEED = 23
SIZES = {"train": (320, 12), "validation": (60, 5), "test": (100, 6)}  # tasks, zones
KINDS = ["extend", "extended_once", "unpaid", "capped", "quote", "two_permits"]
FIRST = [
    "Aaron",
    "Bettina",
    "Cedric",
    "Daria",
    "Emil",
    "Fatma",
    "Georg",
    "Heidi",
    "Imran",
    "Jasmin",
    "Kurt",
    "Leonie",
    "Marek",
    "Nina",
    "Otto",
    "Priya",
    "Quentin",
    "Rosa",
    "Stefan",
    "Tilda",
    "Umberto",
    "Vesna",
    "Walter",
    "Xenia",
    "Yusuf",
    "Zora",
    "Anders",
    "Birgit",
    "Cosima",
    "Dietmar",
]
LAST = [
    "Achter",
    "Bauer",
    "Conti",
    "Demir",
    "Eklund",
    "Fischer",
    "Gruber",
    "Horvat",
    "Iversen",
    "Jovic",
    "Klein",
    "Larsen",
    "Meyer",
    "Nowak",
    "Orlov",
    "Pichler",
    "Reiter",
    "Sommer",
    "Tanner",
    "Ulrich",
    "Vogel",
    "Wagner",
    "Yildiz",
    "Zanetti",
]
ZONES = [f"{w}-{n}" for w in ["Harbour", "Castle", "Mill", "Station", "Garden", "Market", "Abbey", "Bridge"] for n in (1, 2, 3)]
EXTEND = [
    "Hello, please extend my parking permit{z} by {m}. {who}.",
    "{who}. I would like {m} more on my resident permit{z}.",
    "My permit{z} runs out soon, can you prolong it for {m}? {who}.",
    "{who}, and I need my permit{z} to be valid {m} longer.",
    "Could I get an extension of {m} for my permit{z}? {who}. Thanks!",
    "Hi, {who}. Please add {m} to my parking permit{z}.",
    "We are staying longer than planned, so {m} more for my permit{z} please. {who}.",
]
QUOTE = [
    "What would {m} more on my permit{z} cost? Don't change anything yet. {who}.",
    "{who}. How much is it to extend my permit{z} by {m}? I only want to know the price.",
    "Just a question: how much do you charge for prolonging my permit{z} by {m}? {who}.",
    "{who}, can you tell me the price of an extension of {m} for my permit{z}? I will decide later.",
    "Before I decide: what does it cost to extend my permit{z} by {m}? {who}.",
    "Hi, {who}. I wonder how much {m} more would be for my permit{z}, only asking for now.",
]
WHO = {"name": ["this is {}", "my name is {}", "{} here"], "plate": ["my plate is {}", "the car is {}", "I drive {}"]}


@lru_cache
def world(seed=SEED):
    """All rows by table and all tasks by split; no permit, holder or zone is in two splits."""
    rng = random.Random(seed)
    names = rng.sample([f"{a} {b}" for a in FIRST for b in LAST], 520)
    ids, zones = rng.sample(range(1000, 9999), 800), rng.sample(ZONES, len(ZONES))
    plates = [f"{a}{b}-{n}" for n in rng.sample(range(100, 1000), 800) for a, b in [rng.choices("BDFGHKLMNRSTVW", k=2)]]
    rows, tasks = {"zones": [], "permits": [], "tickets": []}, {}

    def permit(holder, zone, once, owed):
        pid, plate = f"R-{ids.pop()}", plates.pop()
        until = (date(2026, 3, 12) + timedelta(rng.randrange(50))).isoformat()
        rows["permits"].append((pid, holder, plate, zone, until, int(once), 0))
        paid = [rng.choice([25, 40, 55])] if rng.random() < 0.2 else []
        rows["tickets"] += [
            (len(rows["tickets"]) + i, pid, a, p) for i, (a, p) in enumerate([(a, 1) for a in paid] + [(a, 0) for a in owed])
        ]
        return pid, plate, until

    for split, (n_tasks, n_zones) in SIZES.items():
        mine = {zones.pop(): (rng.choice([12, 14, 15, 18, 21, 24, 26]), rng.choice([3, 4, 5])) for _ in range(n_zones)}
        rows["zones"] += [(z, *v) for z, v in mine.items()]
        tasks[split] = []
        for i in range(n_tasks):
            kind = rng.choice(KINDS)
            case = rng.choice(KINDS[:5]) if kind == "two_permits" else kind
            holder, (zone, other) = names.pop(), rng.sample(list(mine), 2)
            rate, most = mine[zone]
            months = most + rng.randint(1, 4) if case == "capped" else rng.randint(1, most)
            if case == "quote":
                months = rng.randint(3, most)
            owed = [rng.choice([35, 40, 55, 70]) for _ in range(rng.randint(1, 2))] if case == "unpaid" else []
            pid, plate, until = permit(holder, zone, case == "extended_once", owed)
            if kind == "two_permits":
                permit(holder, other, rng.random() < 0.5, [40] if rng.random() < 0.3 else [])
            by = "name" if kind == "two_permits" else rng.choice(["name", "plate"])
            text = rng.choice(QUOTE if case == "quote" else EXTEND).format(
                who=rng.choice(WHO[by]).format(holder if by == "name" else plate),
                m=f"{months} month" + "s" * (months > 1),
                z=f" for zone {zone}" if kind == "two_permits" else "",
            )
            text = re.sub(r"(^|[.!?] )([a-z])", lambda m: m[1] + m[2].upper(), text)
            granted = min(months, most)
            tasks[split].append(
                {
                    "id": f"parking-{split}-{i:03d}",
                    "kind": kind,
                    "case": case,
                    "instruction": text,
                    "permit": pid,
                    "ends": until,
                    "until": add_months(until, granted),
                    "fee": granted * rate,
                    "owed": sum(owed),
                }
            )
    for holder in names[:30]:  # nobody writes about these
        permit(holder, rng.choice(rows["zones"])[0], rng.random() < 0.3, [])
    return {t: sorted(r) for t, r in rows.items()}, tasks


def make_tasks(split, seed=SEED):
    return world(seed)[1][split]


def reset(db_path, seed=SEED):
    """Write the database as it is before any episode."""
    Path(db_path).unlink(missing_ok=True)
    with closing(sqlite3.connect(db_path)) as con, con:
        con.executescript(
            "CREATE TABLE zones (name TEXT PRIMARY KEY, rate INT, max_months INT);"
            "CREATE TABLE permits (id TEXT PRIMARY KEY, holder TEXT, plate TEXT, zone TEXT, until TEXT,"
            " extensions INT, fees INT);"
            "CREATE TABLE tickets (id INTEGER PRIMARY KEY, permit_id TEXT, amount INT, paid INT);"
        )
        for table, rows in world(seed)[0].items():
            con.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(rows[0]))})", rows)


def episode_db(master, path):
    """One episode works on its own copy."""
    shutil.copyfile(master, path)
    return path


def _dump(con):
    return {t: sorted(con.execute(f"SELECT * FROM {t}")) for t in ("zones", "permits", "tickets")}


def names_amount(text, amount):
    return re.search(rf"(?<![\d.-]){amount}(?!\d|[.,:/-]\d*[1-9])", text) is not None


def names_day(text, iso):
    d, text = date.fromisoformat(iso), text.lower()
    month = {3: "mar(ch)?", 4: "apr(il)?", 5: "may"}[d.month]
    forms = [
        iso,
        rf"\b0?{d.day}(st|nd|rd|th)?( of)? {month}\b",
        rf"\b{month}\.? 0?{d.day}(st|nd|rd|th)?\b",
        rf"\b0?{d.day}[./]0?{d.month}\b",
    ]
    return any(re.search(f, text) for f in forms)


def check(task, db_before, db_after, final_message):
    """1.0 if exactly the right rows changed and the answer tells what matters, else 0.0."""
    with closing(sqlite3.connect(":memory:")) as want, closing(sqlite3.connect(db_before)) as con:
        con.backup(want)
        if task["case"] in ("extend", "capped"):
            want.execute(
                "UPDATE permits SET until = ?, extensions = 1, fees = ? WHERE id = ?",
                (task["until"], task["fee"], task["permit"]),
            )
        with closing(sqlite3.connect(db_after)) as after:
            if _dump(want) != _dump(after):
                return 0.0
    text = final_message or ""
    if task["case"] == "extended_once":
        refused = re.search(r"not possible|impossible|(cannot|can't|can not|not) be extended", text, re.I)
        return float(refused is not None and names_day(text, task["ends"]))
    return float(names_amount(text, task["owed"] if task["case"] == "unpaid" else task["fee"]))
