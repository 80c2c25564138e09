"""The clinic's database, its tasks and the check."""

import random
import re
import shutil
import sqlite3
from contextlib import closing
from datetime import date, timedelta
from functools import lru_cache
from pathlib import Path

from agent import TODAY

SEED = 11
SIZES = {"train": (320, 20), "validation": (60, 6), "test": (100, 8)}  # tasks, therapists
KINDS = ["move_free", "move_fee", "too_late", "waitlist", "two_visits"]
FIRST = [
    "Mara",
    "Jonas",
    "Elif",
    "Piotr",
    "Ines",
    "Tariq",
    "Greta",
    "Luca",
    "Noor",
    "Sven",
    "Amina",
    "Bruno",
    "Clara",
    "Dario",
    "Edith",
    "Felix",
    "Hana",
    "Ivo",
    "Judit",
    "Karim",
    "Lena",
    "Milan",
    "Nadia",
    "Oskar",
    "Paula",
    "Rafael",
    "Selma",
    "Tomas",
    "Ulla",
    "Vera",
]
LAST = [
    "Lind",
    "Brandt",
    "Costa",
    "Dvorak",
    "Engel",
    "Farkas",
    "Gallo",
    "Hofer",
    "Ivanov",
    "Jensen",
    "Kaya",
    "Lopez",
    "Maier",
    "Novak",
    "Olsen",
    "Petrov",
    "Quist",
    "Rossi",
    "Santos",
    "Toth",
    "Urban",
    "Vidal",
    "Weiss",
    "Ziegler",
]
THERAPISTS = [
    "Okafor",
    "Kim",
    "Barlow",
    "Haddad",
    "Lindqvist",
    "Moreau",
    "Nakata",
    "Osei",
    "Pereira",
    "Quinn",
    "Radic",
    "Sato",
    "Tanaka",
    "Umarov",
    "Vance",
    "Walsh",
    "Xu",
    "Yilmaz",
    "Zeman",
    "Abbott",
    "Boyle",
    "Chandra",
    "Doyle",
    "Eriksen",
    "Fontaine",
    "Grant",
    "Hughes",
    "Iyer",
    "Jarvis",
    "Keller",
    "Lambert",
    "Mwangi",
    "Nolan",
    "Ortega",
]
PHRASES = [
    "Hello, {who}. Could you move {visit} to {day} or later?",
    "{who}. {visit} has to be moved, any time from {day} on is fine.",
    "I need a new date for {visit}, not before {day}. {who}.",
    "Hi! Something came up, so please reschedule {visit}. I am free again from {day}. {who}.",
    "Please postpone {visit}, I am away and back on {day}. {who}.",
    "{who}. Can I get another date instead of {visit}? The first one from {day} onwards please.",
    "Good morning, I can't make it to {visit}. {who}. What about {day} or the next free day after it?",
    "{who}, asking to shift {visit}. {day} at the earliest.",
]
WHO = {"name": ["this is {}", "my name is {}", "{} here"], "number": ["my patient number is {}", "I am patient {}"]}
MONTHS = ["", "January", "February", "March", "April", "May"]


def _day(rng, low, high):
    return rng.choice([d for d in range(low, high + 1) if (TODAY + timedelta(d)).weekday() < 6])


def _iso(offset):
    return (TODAY + timedelta(offset)).isoformat()


def _time(rng):
    return f"{rng.randint(8, 16):02d}:{rng.choice(['00', '30'])}"


def _spell(rng, offset):
    d = TODAY + timedelta(offset)
    return rng.choice([d.isoformat(), f"{d.day} {MONTHS[d.month]}", f"{MONTHS[d.month]} {d.day}"])


@lru_cache
def world(seed=SEED):
    """All rows by table and all tasks by split; no patient or therapist is in two splits."""
    rng = random.Random(seed)
    names = rng.sample([f"{a} {b}" for a in FIRST for b in LAST], 520)
    numbers, visit_ids = rng.sample(range(100, 1000), 520), rng.sample(range(2000, 4000), 1000)
    therapists = rng.sample(THERAPISTS, len(THERAPISTS))
    rows = {"therapists": [], "patients": [], "visits": [], "slots": [], "waitlist": []}
    tasks = {}
    for split, (n_tasks, n_therapists) in SIZES.items():
        team, free = [therapists.pop() for _ in range(n_therapists)], {}
        for t in team:
            days = set()
            while len(days) < 4 or max(days) < 15:
                days = {_day(rng, 4, 28) for _ in range(4)}
            free[t] = [(_iso(d), _time(rng), d) for d in sorted(days)]
            rows["slots"] += [(t, day, time, 1) for day, time, _ in free[t]]
        phones = {t: f"555-{rng.randint(1000, 9999)}" for t in team}
        rows["therapists"] += phones.items()
        tasks[split] = []
        for i in range(n_tasks):
            kind = rng.choice(KINDS)
            case = rng.choice(KINDS[:4]) if kind == "two_visits" else kind
            name, number = names.pop(), f"P-{numbers.pop()}"
            rows["patients"].append((number, name))
            mine, other = rng.sample(team, 2)
            away = {"move_free": (7, 12), "move_fee": (2, 6), "too_late": (0, 1), "waitlist": (2, 12)}[case]
            away = _day(rng, *away)
            last = free[mine][-1][2]
            wish = last + rng.randint(1, 6) if case == "waitlist" else rng.randint(away + 1, last)
            booked = [(f"V-{visit_ids.pop()}", mine, away)]
            if kind == "two_visits":
                booked.append((f"V-{visit_ids.pop()}", other, _day(rng, 0, 12)))
            rows["visits"] += [(v, number, t, _iso(a), _time(rng), 0) for v, t, a in booked]
            by = rng.choice(["name", "number"])
            text = rng.choice(PHRASES).format(
                who=rng.choice(WHO[by]).format(name if by == "name" else number),
                day=_spell(rng, wish),
                visit=rng.choice(["my visit", "my appointment"]) + (f" with {mine}" if kind == "two_visits" else ""),
            )
            text = re.sub(r"(^|[.!?] )([a-z])", lambda m: m[1] + m[2].upper(), text)
            slot = next(((d, t) for d, t, o in free[mine] if o >= wish), None)
            tasks[split].append(
                {
                    "id": f"clinic-{split}-{i:03d}",
                    "kind": kind,
                    "case": case,
                    "instruction": text,
                    "visit": booked[0][0],
                    "therapist": mine,
                    "phone": phones[mine],
                    "slot": slot,
                    "fee": 35 if away < 7 else 0,
                }
            )
    rows["patients"] += [(f"P-{numbers.pop()}", name) for name in names[:30]]  # nobody writes about these
    rows["patients"].sort()
    rows["visits"].sort()
    return rows, tasks


def make_tasks(split, seed=SEED):
    return world(seed)[1][split]


def reset(db_path, seed=SEED):
    """Write the database as it is before any episode."""
    Path(db_path).unlink(missing_ok=True)
    with closing(sqlite3.connect(db_path)) as con, con:
        con.executescript(
            "CREATE TABLE therapists (name TEXT PRIMARY KEY, phone TEXT);"
            "CREATE TABLE patients (id TEXT PRIMARY KEY, name TEXT);"
            "CREATE TABLE visits (id TEXT PRIMARY KEY, patient_id TEXT, therapist TEXT, day TEXT, time TEXT, fee INT);"
            "CREATE TABLE slots (therapist TEXT, day TEXT, time TEXT, free INT);"
            "CREATE TABLE waitlist (visit_id TEXT PRIMARY KEY, fee INT);"
        )
        for table, rows in world(seed)[0].items():
            if rows:
                con.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(rows[0]))})", rows)


def episode_db(master, path):
    """One episode works on its own copy."""
    shutil.copyfile(master, path)
    return path


def _dump(con):
    return {t: sorted(con.execute(f"SELECT * FROM {t}")) for t in world()[0]}


def names_day(text, iso):
    d, text = date.fromisoformat(iso), text.lower()
    month = MONTHS[d.month].lower()
    forms = [
        iso,
        rf"\b0?{d.day}(st|nd|rd|th)?( of)? ({month}|{month[:3]})\b",
        rf"\b({month}|{month[:3]})\.? 0?{d.day}(st|nd|rd|th)?\b",
        rf"\b0?{d.day}[./]0?{d.month}\b",
    ]
    return any(re.search(f, text) for f in forms)


def check(task, db_before, db_after, final_message):
    """1.0 if exactly the right rows changed and the answer tells what matters, else 0.0."""
    with closing(sqlite3.connect(":memory:")) as want, closing(sqlite3.connect(db_before)) as con:
        con.backup(want)
        if task["case"] in ("move_free", "move_fee"):
            want.execute(
                "UPDATE visits SET day = ?, time = ?, fee = ? WHERE id = ?", (*task["slot"], task["fee"], task["visit"])
            )
            want.execute(
                "UPDATE slots SET free = 0 WHERE therapist = ? AND day = ? AND time = ?", (task["therapist"], *task["slot"])
            )
        elif task["case"] == "waitlist":
            want.execute("INSERT INTO waitlist VALUES (?, 0)", (task["visit"],))
        with closing(sqlite3.connect(db_after)) as after:
            if _dump(want) != _dump(after):
                return 0.0
    text = final_message or ""
    says_fee = re.search(r"(?<![\d.-])35(?!\d|[.,:-]\d*[1-9])", text) is not None
    if task["case"] == "too_late":
        return float(task["phone"][4:] in text)
    if task["case"] == "waitlist":
        return float(re.search(r"wait(ing)?[ -]?list", text, re.I) is not None)
    return float(names_day(text, task["slot"][0]) and says_fee == (task["case"] == "move_fee"))
