"""`dreamgym try` and `dreamgym init`: an agent and its traces, looked at before anybody trains."""

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from dreamgym_lg.cli.agent import Agent, Isolated, PassThrough, SimulateNode, Source, Writes
from dreamgym_lg.cli.console import errors_shown, say
from dreamgym_lg.cli.play import show_episode
from dreamgym_lg.compiled.compile import compile_world
from dreamgym_lg.compiled.responder import compiled_dream
from dreamgym_lg.dream import Dream, Recorded, References, Schemas
from dreamgym_lg.errors import ConfigurationError, writing
from dreamgym_lg.experiment import gate
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.experiment.experience_models import own_policy
from dreamgym_lg.gym import DreamGym
from dreamgym_lg.hosted import EXAMPLE_MODEL
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.simulate.doctor import Examination
from dreamgym_lg.traces import lacking_rewards, load_traces, outcome
from dreamgym_lg.types import DECIDERS, Task, Trajectory

Experience = Annotated[
    str | None,
    typer.Option(help=f"Answers where traces do not, and judges, e.g. {EXAMPLE_MODEL}. Default: code made of the traces."),
]
Policy = Annotated[str | None, typer.Option(help=f"The chat model that acts, e.g. {EXAMPLE_MODEL}. Default: the agent's own.")]
LIMIT = 20
"""Episodes of each kind that the gate looks at."""


def try_agent(
    agent: Agent,
    traces: Source,
    experience_model: Experience = None,
    policy: Policy = None,
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks to play.")] = 20,
    out: Annotated[Path, typer.Option(help="Folder of the replay buffer and the episodes.")] = Path("runs/try"),
    writes: Writes = None,
    isolation: Isolated = None,
    pass_through: PassThrough = None,
    simulate_node: SimulateNode = None,
) -> None:
    """Play your agent in a dream of its traces, before anybody trains.

    Shows its score, three episodes, and how far to trust the dream. No tool runs. Without an experience model, recorded answers
    and code compiled from the traces answer, on the tasks that recorded successes judge.
    """
    simulated = {"pass_through": pass_through or (), "simulate_nodes": simulate_node or ()}
    options: dict[str, Any] = {"isolation": isolation, "writes": writes or None, **simulated}
    with errors_shown(resumes=True):
        out.mkdir(parents=True, exist_ok=True)
        with ReplayBuffer(out / "replay.db") as buffer:
            _read(traces, buffer)
            dream = None if experience_model else _compiled_dream(agent, buffer, out, options)
            gym = DreamGym(
                agent, replay_buffer=buffer, experience_model=experience_model, dream=dream, out=out, say=say, **options
            )
            _say_parts(gym.examine())
            chosen = _tasks(gym, tasks)
            rate, episodes = gym.evaluate(own_policy(policy, gym.world.graph), tasks=chosen, run="try")
            say(f"{agent} in the dream: success {rate} on {len(chosen)} tasks", "bold")
            _say_deciders(episodes)
            for episode in sorted(episodes, key=lambda each: each.error is not None)[:3]:  # whole ones first
                say(f"\ntask: {episode.task.instruction}", "bold cyan")
                show_episode(episode)
            _say_gate(gym)
    say(f"\nnext: dreamgym init {agent} {traces}", "bold")


def _read(traces: Path, buffer: ReplayBuffer) -> None:
    """Read traces into the buffer, and say what was read and rejected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # said below
        loaded = load_traces(traces)
        read = list(loaded)
    buffer.extend(read)
    successes = sum(each.success for each in read)
    say(f"{len(read)} traces read, {successes} of them successes; {len(loaded.rejected)} rejected")
    for each in loaded.rejected[:3]:
        say(f"    line {each.line}: {each.reason}", "yellow")
    if lack := lacking_rewards([outcome(each) for each in read]):
        say(lack, "bold")


def _compiled_dream(agent: str, buffer: ReplayBuffer, out: Path, options: dict[str, Any]) -> Dream:
    """The dream of recorded answers and a world compiled from them; without a model."""
    world = AgentWorld(agent, **options)
    index, folder = world.index(buffer), out / "world"
    try:
        tools = compile_world(buffer, folder, tools=index.tools, writes=world.writing_tools(buffer))
    except ConfigurationError as error:
        say(f"recorded answers alone: nothing could be compiled from the traces ({error})", "yellow")
        return Dream([Schemas(index.tools), Recorded(index)], judges=[References(index)])
    admitted = [each.tool for each in tools if each.admitted]
    say(f"compiled from the traces: {len(admitted)} of {len(tools)} tools ({', '.join(admitted) or 'none replays exactly'})")
    return compiled_dream(folder, index)


def _tasks(gym: DreamGym, number: int) -> list[Task]:
    """Draw held-out tasks; without a model that judges, training tasks that recorded successes judge."""
    dream = gym.experiment.dream()
    if dream.language_models:
        usable = gym.tasks("validation") or gym.tasks("train")
    else:
        usable = [task for task in gym.tasks("train") if dream.decides_by_traces(task)]
    if not usable:
        raise ConfigurationError(
            "no recorded success judges any task, and there is no experience model that could: import traces with their "
            f"outcome, or give --experience-model, e.g. {EXAMPLE_MODEL}"
        )
    return Random(0).sample(usable, min(number, len(usable)))


def _say_parts(examination: Examination) -> None:
    """Say how the dream handles the agent's parts."""
    kinds = Counter((part.handling, part.kind) for part in examination.parts)
    for handling in dict.fromkeys(part.handling for part in examination.parts):
        parts = ", ".join(f"{number} {kind}" for (way, kind), number in kinds.items() if way == handling)
        say(f"{handling}: {parts}", "red" if any(part.handling == handling for part in examination.problems) else "")
    if examination.writes_line:
        say(examination.writes_line)


def _say_deciders(episodes: Sequence[Trajectory]) -> None:
    """Say who answered the calls, and how many episodes ended where nobody could."""
    steps = (step for each in episodes for step in each.steps if step.decided_by)
    names = Counter(DECIDERS.get(step.decided_by, step.decided_by) for step in steps)
    total = max(sum(names.values()), 1)
    shares = ", ".join(f"{name} {number / total:.0%}" for name, number in names.most_common())
    cut = sum(each.error is not None for each in episodes)
    say(f"answered by: {shares}" + (f"; {cut} episodes ended at a call that nothing in the dream answers" if cut else ""))


def _say_gate(gym: DreamGym) -> None:
    """Say how the gate before training judges this dream."""
    judgement, limit = gym.fidelity(limit=LIMIT), gym.experiment.settings.max_false_success
    say(f"\nthe gate: {gate.summary(judgement)}")
    causes = list(gate.refusals(judgement, 1.0 if limit is None else limit))
    for cause in causes:
        say(f"    it would refuse to train: {cause}", "yellow")
    if causes and (examples := gate.examples(judgement)):
        say(f"    {examples}", "dim")


# --- init ------------------------------------------------------------------------------------------------------------------

TRAIN = '''"""Trains {agent} in a dream of its traces. Run: python {file}"""

from dataclasses import replace

from dreamgym_lg import DreamGym, ReplayBuffer, load_traces
from dreamgym_lg.experiment.agent_world import AgentWorld

replay_buffer = ReplayBuffer("replay.db")  # the traces, and every episode to come
replay_buffer.extend(load_traces({traces!r}))


def verify_real(task, state):
    """The real outcome, 0 to 1, from your staging system: what is right there after `task`?"""
    raise NotImplementedError("look at your staging system here, and give reset_real= to DreamGym, which resets it")


gym = DreamGym(
    {agent!r},
    replay_buffer=replay_buffer,  # a fifth of its tasks is held out for validation
    experience_model={model!r},  # answers where traces do not; None trains a local one from the traces
    writes={writes},  # the tools that change something; every other tool reads
    settings=replace(AgentWorld.settings, references_only={only}),  # True: recorded successes judge, no model does
    # verify_real=verify_real, reset_real=...,  # with these, validation and proof are real
    out="runs/mine",
)

if __name__ == "__main__":
    gym.prepare()  # imitation of the recorded successes: what training has to beat
    gym.train(iterations=40)  # stopped at any time, the same command goes on
    gym.export("policies/mine")
'''


def init(
    agent: Agent,
    traces: Source,
    to: Annotated[Path, typer.Option(help="The file to write.")] = Path("train.py"),
    experience_model: Experience = None,
    writes: Writes = None,
    isolation: Isolated = None,
) -> None:
    """Write a commented train.py for your agent.

    It names the traces and the tools that write, and has a stub of the real check."""
    with errors_shown():
        if to.exists():
            raise ConfigurationError(f"{to} exists: give another file (--to), or remove it")
        with ReplayBuffer(":memory:") as buffer:
            _read(traces, buffer)
            names = sorted(AgentWorld(agent, isolation=isolation, writes=writes or None).writing_tools(buffer))
        values = {"agent": agent, "traces": str(traces), "model": experience_model, "only": experience_model is None}
        text = TRAIN.format(file=to, writes=json.dumps(names), **values)
        with writing(to):
            to.write_text(text)
    say(f"{to} is written. Check `writes=` there; then: python {to}")
