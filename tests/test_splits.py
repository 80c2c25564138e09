"""Splits by entity: whatever two tasks name together, they stay on one side."""

import json
import lzma
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dreamgym_lg import ReplayBuffer, Task, Trajectory, split_tasks
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.splits import common_entities, entities, sharing

TAU = Path(__file__).parents[2] / "shared" / "data" / "tau"


def tasks_of(texts: Iterable[str], **fields: Any) -> list[Task]:
    return [Task(id=f"t{number}", instruction=text, environment="desk", **fields) for number, text in enumerate(texts)]


def sizes(tasks: Sequence[Task]) -> Mapping[str, int]:
    return Counter(task.split for task in tasks)


def sides(tasks: Sequence[Task]) -> list[str]:
    return [task.split for task in tasks]


# --- entities ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Where is #A-17? And order a17?", {"a17"}),
        ("I am yusuf_rossi_9620, order #W2378156", {"yusufrossi9620", "w2378156"}),
        ("Pay $1,000.00, not 1000.", {"1000"}),
        ("It was 12.50, or €20, or 7.", {"12.5", "20"}),
        ("Two rooms for 3 nights and 14 days", set()),
        ("On 2024-05-01 at 10:30", {"20240501", "1030"}),
        ("Write to Anna.Berg@x.org!", {"anna.berg@x.org"}),
        ("I am Anna Berg. Anna asked Bob's aunt.", {"anna berg", "bob"}),
        ("Anna Berg wants a room", {"anna berg", "berg"}),
        ("Please send it. Thanks! Bye", set()),
        ("I'd like USB and a PDF, says Zoë", {"zoë"}),
        ('Play "Blue in Green" for us', {"blue in green", "blue", "green"}),
        ("Straße 12b, bei Ümit", {"12b", "ümit"}),
        ("", set()),
    ],
)
def test_what_a_text_names(text: str, named: set[str]) -> None:
    assert entities(text) == named


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Dear shop, May I return it? Please, Anna Berg", {"anna berg"}),
        ("Thanks, Anna Berg", {"anna berg"}),
        ("Anna Berg wants it", {"anna berg", "berg"}),
        ("May Berg wants it", {"berg"}),
    ],
)
def test_words_that_some_text_writes_small_are_no_names(text: str, named: set[str]) -> None:
    assert entities(text, {"may", "please", "thanks"}) == named


def test_an_entity_is_common_in_more_than_a_tenth_of_the_tasks_and_in_more_than_five() -> None:
    named = [{"Bonn"} if number < 6 else {"Berne"} if number < 11 else {number} for number in range(50)]
    assert common_entities(named) == {"Bonn"}
    assert common_entities(named * 2) == {"Bonn"}, "10 of 100 are no more than a tenth"
    assert common_entities(named, 0.2) == frozenset()
    assert common_entities([{"Bonn"}] * 5) == frozenset()


# --- splits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_same_order_in_other_words_is_on_the_same_side(seed: int) -> None:
    first = [f"Please refund order K-{1000 + number}, it arrived broken." for number in range(20)]
    second = [f"I never got #k{1000 + number}: where is my parcel?" for number in range(20)]
    split = split_tasks(tasks_of([*first, *second]), seed=seed)
    assert sides(split[:20]) == sides(split[20:])
    assert sizes(split) == {"train": 28, "validation": 4, "test": 8}


def test_what_is_tied_through_another_task_is_on_the_same_side() -> None:
    chained = ["Refund K-1000.", "Send K-1000 to Anna Berg.", "I am Anna Berg, I paid 4,711.", "Why 4711?"]
    split = split_tasks(tasks_of([*chained, *(f"Where is Q-{number}?" for number in range(100, 130))]), seed=1)
    assert len({*sides(split[:4])}) == 1


def test_what_most_tasks_name_ties_nothing_and_the_same_words_always_do() -> None:
    texts = [f"Send order K-{1000 + number} to Bonn, says Anna Berg." for number in range(40)]
    assert sizes(split_tasks(tasks_of(texts))) == {"train": 28, "validation": 4, "test": 8}
    with pytest.raises(ConfigurationError, match="40 tasks are 1 groups that share an entity, the largest of 40"):
        split_tasks(tasks_of(texts), by=lambda task: entities(task.instruction))
    repeated = ["What do you sell?"] * 9 + texts
    assert len({*sides(split_tasks(tasks_of(repeated))[:9])}) == 1


def test_by_says_what_ties_tasks() -> None:
    tasks = [
        Task(id=str(number), instruction="What is my balance?", environment="bank", metadata={"customer": number % 10})
        for number in range(60)
    ]
    split = split_tasks(tasks, by=lambda task: [task.metadata["customer"]], validation=0.2, test=0.3, seed=3)
    of_customer = defaultdict[int, set[str]](set)
    for task in split:
        of_customer[task.metadata["customer"]].add(task.split)
    assert all(len(each) == 1 for each in of_customer.values()), "each is of a tenth of the tasks, and ties all the same"
    assert sizes(split) == {"train": 30, "validation": 12, "test": 18}
    for keys in ("K-1", 3):
        with pytest.raises(ConfigurationError, match=rf"by= gives {keys!r} for the task '0': let it give a list of keys"):
            split_tasks(tasks, by=lambda task, keys=keys: keys)  # type: ignore[misc]


def test_the_same_seed_gives_the_same_splits_in_the_order_of_the_tasks() -> None:
    tasks = tasks_of((f"Where is K-{number}?" for number in range(100, 150)), rubric="It is told.")
    split = split_tasks(tasks, seed=7)
    assert split == split_tasks(tasks, seed=7) != split_tasks(tasks, seed=8)
    assert [task.id for task in split] == [task.id for task in tasks] and split[0].metadata == tasks[0].metadata
    assert split_tasks(split, seed=7) == split, "splits that tasks had before do not count"


def test_a_share_of_0_makes_no_split_and_a_small_one_a_task_at_least() -> None:
    tasks = tasks_of(f"Where is K-{number}?" for number in range(100, 106))
    assert sizes(split_tasks(tasks, validation=0, test=0.5)) == {"train": 3, "test": 3}
    assert sizes(split_tasks(tasks, validation=0.1, test=0)) == {"train": 5, "validation": 1}
    assert sizes(split_tasks(tasks)) == {"train": 4, "validation": 1, "test": 1}


@pytest.mark.parametrize(
    ("number", "options", "told"),
    [
        (10, {"validation": -0.1}, "validation=-0.1: give a share"),
        (10, {"test": 1.5}, r"test=1.5: give a share of the tasks between 0 and 1"),
        (10, {"validation": 0.5, "test": 0.5}, "validation=0.5 and test=0.5 leave no task to train on"),
        (2, {}, r"validation=0.1, test=0.2: no task is left for the split 'train'\. The 2 tasks are 2 groups"),
        (1, {}, "no task is left for the split 'validation'"),
        (0, {}, "no task is left for the split 'test'. The 0 tasks are 0 groups"),
    ],
)
def test_what_cannot_be_split_is_refused_with_what_to_give(number: int, options: dict[str, float], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        split_tasks(tasks_of(f"Where is K-{n}?" for n in range(100, 100 + number)), **options)


def test_traces_whose_tasks_are_split_are_held_out_in_their_buffer() -> None:
    with ReplayBuffer(":memory:") as buffer:
        recorded = [*tasks_of(f"Where is K-{n}?" for n in range(100, 120))]
        buffer.extend(Trajectory(task=task, run="traces") for task in recorded)
        buffer.add_tasks(split_tasks(buffer.tasks(origin="real")))
        assert sizes(buffer.tasks()) == {"train": 14, "validation": 2, "test": 4}


@pytest.mark.parametrize("domain", ["retail", "airline"])
@pytest.mark.parametrize("seed", range(5))
def test_no_customer_and_no_order_of_tau_is_on_two_sides(domain: str, seed: int) -> None:
    file = TAU / f"tau_{domain}_tasks.json.xz"
    if not file.exists():
        pytest.skip(f"needs tau-bench's tasks: {file} (the folder shared/ beside the checkout)")
    rows = json.loads(lzma.decompress(file.read_bytes()))
    split = split_tasks(tasks_of(row["user_scenario"] for row in rows), seed=seed)
    seen = defaultdict[str, set[str]](set)
    for row, task in zip(rows, split, strict=True):
        ids = [row["user_id"], *(call["arguments"].get("order_id") for call in row["actions"])]
        for id in filter(None, [*ids, *(call["arguments"].get("reservation_id") for call in row["actions"])]):
            seen[id].add(task.split)
    assert all(len(each) == 1 for each in seen.values())
    assert sizes(split)["train"] > len(rows) / 2 and sizes(split)["test"] > sizes(split)["validation"] > 0


def test_tasks_that_name_what_a_held_out_one_names_are_found() -> None:
    train = tasks_of(["Where is K-100?", "Cancel k100, please.", "Where is K-101?", "Who is Anna Berg?", "Hello!"])
    held_out = tasks_of(["Refund K-100.", "Send it to Anna Berg", "Where is K-102?"])
    assert sharing(train, held_out) == {"t0": "k100", "t1": "k100", "t3": "anna berg"}
    assert sharing(train, []) == {} and sharing([], held_out) == {}
    assert sharing(tasks_of(["Hello!"]), tasks_of(["hello"])) == {"t0": "hello"}
    many = tasks_of(f"Send K-{number} to Rome City" for number in range(100, 160))
    assert sharing(many[:50], many[50:]) == {}, "what most of them name ties nothing"
    dated, later = ["Send K-1 to Bern on 2026-03-24."], ["Send K-2 to Bern on 2026-03-24, Ms. Adler."]
    assert sharing(tasks_of(dated), tasks_of([*later, "Is Adler there?"])) == {}, "a city, a day and a surname are no entity"
    one, same, other = (tasks_of(["Hello!"], goal={"goal": goal}) for goal in ("A refund.", "A refund.", "My bill."))
    assert sharing(one, same) and not sharing(one, other), "a conversation is told by its goal too"
