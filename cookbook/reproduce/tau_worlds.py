"""How exactly a world compiled from tau-bench's recordings answers its real engine, tool by tool. No model is asked.

Run: python cookbook/reproduce/tau_worlds.py --data FOLDER [--domain airline|retail] [--out runs/tau-worlds] [--calls 2000]

FOLDER holds tau_{airline,retail}{,_tasks,_walks}.json.xz and tau_airline_conversations.json.xz. The world is compiled from the
training split's conversations and walks. It then answers, behind the recorded calls, the walks of the other splits; and calls
that are drawn here and made on the real engine as well: recorded calls of training walks, some of their arguments exchanged
for another walk's, so that the engine refuses many. Answers are compared byte for byte; a tool that was not admitted answers
nothing.
"""

import argparse
import json
import lzma
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from random import Random
from typing import Any

from dreamgym_lg import ReplayBuffer, Step, Task, Trajectory
from dreamgym_lg.actions import render_call
from dreamgym_lg.compiled import Compiled, compile_world
from dreamgym_lg.compiled.recordings import Trace
from dreamgym_lg.integrations.tau import load_conversations, load_domain, load_tasks

READS = ("get_", "find_", "list_", "search_", "calculate", "think", "transfer")
"""Beginnings of the names of tools that change nothing."""
Calls = list[tuple[str, Mapping[str, Any], str]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--domain", choices=["airline", "retail"])
    parser.add_argument("--out", type=Path, default=Path("runs/tau-worlds"))
    parser.add_argument("--calls", type=int, default=2000)
    given = parser.parse_args(arguments)
    for name in [given.domain] if given.domain else ["airline", "retail"]:
        print(measure(name, given.data, given.out / name, given.calls), flush=True)


def measure(name: Any, data: Path, out: Path, count: int) -> str:
    """The table of one domain. A world that is there is measured, not compiled again."""
    splits = {task.id: task.split for task in load_tasks(name, data)}
    walks: list[tuple[str, Calls]] = []
    for walk in json.loads(lzma.decompress((data / f"tau_{name}_walks.json.xz").read_bytes())):
        walks.append((f"tau-{name}-{walk['task']}", [(s["name"], s["arguments"], s["answer"]) for s in walk["steps"]]))
    train = [calls for task, calls in walks if splits[task] == "train"]
    begun = time.monotonic()
    if not out.exists():
        conversations = load_conversations(name, data) if name == "airline" else []
        with ReplayBuffer(
            ":memory:"
        ) as replay_buffer:  # the walks last: customers' records have changed since the conversations
            replay_buffer.extend(each for each in conversations if each.task.split == "train")
            replay_buffer.extend(_trajectory(name, number, calls) for number, calls in enumerate(train))
            tools = {tool for calls in train for tool, _, _ in calls}
            compile_world(replay_buffer, out, writes=[tool for tool in tools if not tool.startswith(READS)])
    seconds, world = time.monotonic() - begun, Compiled(out)
    held_out = tally(world, [calls for task, calls in walks if splits[task] != "train"])
    known = {(tool, json.dumps(own, sort_keys=True)) for calls in train for tool, own, _ in calls if tool.startswith(READS)}
    drawn = tally(world, draw(load_domain(name, data), train, count), known)
    world.close()
    admitted = json.loads((out / "rules.json").read_text())["admitted"]
    rows = [
        f"| `{tool}` | {'reads' if tool.startswith(READS) else 'writes'} | {'yes' if ok else 'no'} | "
        f"{' / '.join(map(str, held_out[tool][:3]))} | {' / '.join(map(str, drawn[tool][:3]))} | {drawn[tool][3]} |"
        for tool, ok in sorted(admitted.items(), key=lambda each: (not each[0].startswith(READS), each[0]))
    ]
    head = "| tool | use | admitted | held-out walks | drawn calls | known, refused |"
    return "\n".join([f"## {name}: compiled in {seconds:.0f} s", "", head, "|---|---|---|---|---|---|", *rows, ""])


def _trajectory(name: str, number: int, calls: Calls) -> Trajectory:
    steps = [Step(observation="", action=render_call(tool, own), next_observation=answer) for tool, own, answer in calls]
    task = Task(id=f"walk-{number}", instruction="A walk.", environment=f"tau-{name}", tools=[])
    return Trajectory(task=task, steps=steps)


def draw(domain: Any, walks: Sequence[Calls], count: int) -> Iterable[Calls]:
    """Episodes of 8 calls on the engine, `count` calls in all: recorded ones, one of three with another walk's argument."""
    rng, values = Random(1), defaultdict[tuple[str, str], list[Any]](list)
    for tool, own, _ in (call for walk in walks for call in walk):
        for argument, value in own.items():
            values[tool, argument].append(value)
    for _ in range(count // 8):
        database, calls = domain.create_database(), Calls()
        pool = [call for walk in rng.sample(walks, 2) for call in walk]
        for tool, own, _ in sorted(rng.choices(pool, k=8), key=lambda _: rng.random()):
            if own and rng.random() < 1 / 3:
                argument = rng.choice(sorted(own))
                own = {**own, argument: rng.choice(values[tool, argument])}
            calls.append((tool, own, domain.call(database, tool, own)))
        yield calls


def tally(world: Compiled, episodes: Iterable[Calls], known: Set[tuple[str, str]] = frozenset()) -> Mapping[str, list[int]]:
    """By tool: exact, refused, wrong answers of admitted tools; and refused ones to `known` calls, without a change before."""
    admitted = json.loads((world.folder / "rules.json").read_text())["admitted"]
    counts, shown = defaultdict[str, list[int]](lambda: [0, 0, 0, 0]), set[str]()
    for calls in episodes:
        changed = False
        for (tool, own, answer), said in zip(calls, world.replay(Trace("", calls)), strict=True):
            said = said if admitted.get(tool) else None
            place = 0 if said == answer else 1 if said is None else 2
            counts[tool][place] += 1
            counts[tool][3] += place == 1 and not changed and (tool, json.dumps(own, sort_keys=True)) in known
            changed |= not tool.startswith(READS)
            if place == 2 and tool not in shown:
                shown.add(tool)
                print(f"wrong: {tool} {json.dumps(own)}: {said!r} instead of {answer!r}", flush=True)
    return counts


if __name__ == "__main__":
    main()
