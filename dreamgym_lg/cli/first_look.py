"""`dreamgym try` and `dreamgym init`: first steps with an agent and its traces."""

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import count
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from langchain_core.language_models import BaseChatModel

from dreamgym_lg.cli.agent import Agent, Isolated, PassThrough, SimulateNode, Writes, is_replay_buffer, say_folded, say_rejected
from dreamgym_lg.cli.console import chosen, errors_shown, say
from dreamgym_lg.cli.play import show_episode
from dreamgym_lg.dream import RecordedUser, recorded_user
from dreamgym_lg.errors import ConfigurationError, EpisodesMissing, writing
from dreamgym_lg.experiment import gate
from dreamgym_lg.experiment.agent_world import AgentWorld, dream_of_traces
from dreamgym_lg.experiment.comparison import Meter
from dreamgym_lg.experiment.experience_models import resolve_policy
from dreamgym_lg.gym import DreamGym
from dreamgym_lg.hosted import EXAMPLE_MODEL
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.simulate.doctor import Examination
from dreamgym_lg.simulate.episode import input_hint, required_context
from dreamgym_lg.traces import Rejected, lacking_rewards, load_traces
from dreamgym_lg.types import DECIDERS, Trajectory, is_unanswered

Experience = Annotated[str | None, typer.Option(help=f"Answers what no trace knows, and judges, e.g. {EXAMPLE_MODEL}.")]
Policy = Annotated[
    str | None, typer.Option(help=f"The model that acts: {EXAMPLE_MODEL}, or local weights. Default: the agent's own.")
]
Source = Annotated[Path, typer.Argument(metavar="TRACES", help="A file that `dreamgym import` reads, or its replay buffer.")]
LIMIT = 20
"""Maximum episodes of each kind that the gate is measured on."""


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
    and code compiled from the traces answer, on the tasks that recorded successes judge. Users of recorded conversations talk.
    """
    options = chosen(isolation=isolation, writes=writes, pass_through=pass_through, simulate_nodes=simulate_node)
    meter = Meter()
    with errors_shown():
        out.mkdir(parents=True, exist_ok=True)
        read = _read(traces)
        _set_aside_others(out / "replay.db", read)
        with ReplayBuffer(out / "replay.db") as buffer:
            buffer.extend(read)
            user: dict[str, Any] = {"user": _find_user(buffer, experience_model)}
            dream = None
            if experience_model is None:
                dream = dream_of_traces(agent, buffer, out / "world", say=say, **options, **user)
                user = {}  # it is part of the dream
            options |= {"experience_model": experience_model, "dream": dream, **user}
            gym = DreamGym(agent, replay_buffer=buffer, out=out, say=say, **options)
            _say_parts(gym.examine())
            episodes = _play(gym, meter.attached(resolve_policy(policy, gym.world.graph)), tasks)
            for episode in sorted(episodes, key=lambda each: each.error is not None)[:3]:  # complete ones first
                say(f"\ntask: {episode.task.instruction}", "bold cyan")
                show_episode(episode, lines=False)
            _say_gate(gym)
            _say_cost(gym, meter.sums)
    arguments = [f"--writes {each}" for each in writes or ()]
    arguments += [f"--experience-model {experience_model}"] * bool(experience_model)
    arguments += [f"--isolation {isolation}"] * bool(isolation)
    arguments += [f"--pass-through {each}" for each in pass_through or ()]
    arguments += [f"--simulate-node {each}" for each in simulate_node or ()]
    say(f"\nall of it in the browser: dreamgym ui {out / 'replay.db'}")
    say(f"next: {' '.join(['dreamgym init', agent, str(traces), *arguments])}", "bold")


def _read(traces: Path) -> list[Trajectory]:
    """Read traces from a file or a replay buffer, and report accepted and rejected ones."""
    if is_replay_buffer(traces):
        with ReplayBuffer(traces) as imported:
            read, rejected, folded = list(imported.trajectories(source="offline")), tuple[Rejected, ...](), 0
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # reported below
            loaded = load_traces(traces)
            read, rejected, folded = list(loaded), tuple(loaded.rejected), loaded.folded
    successes, outcomes = sum(each.success for each in read), sum(each.has_outcome for each in read)
    say(f"{len(read)} traces read: {successes} successes, {outcomes - successes} failures")
    say_folded(folded)
    say_rejected(rejected, 3)
    if lack := lacking_rewards(len(read), successes, outcomes):
        say(lack, "bold")
    return read


def _set_aside_others(database: Path, read: Sequence[Trajectory]) -> None:
    """Rename the replay buffer of an earlier try if it holds other traces."""

    def identities(trajectories: Iterable[Trajectory]) -> set[Any]:
        return {
            (each.task.id, each.success, *((step.action, step.next_observation) for step in each.steps))
            for each in trajectories
        }

    if not database.exists():
        return
    with ReplayBuffer(database) as buffer:
        others = identities(buffer.trajectories(source="offline")) - identities(read)
    if others:
        names = (f"earlier{number or ''}.db" for number in count())
        earlier = next(path for name in names if not (path := database.with_name(name)).exists())
        database.replace(earlier)
        say(f"{len(others)} other traces of an earlier try are set aside, with its episodes: {earlier}")


def _find_user(buffer: ReplayBuffer, model: str | None) -> RecordedUser | None:
    """The user of the recorded conversations, which is announced. None if no trace has a user."""
    if (user := recorded_user(buffer, model)) is not None:
        then = f"then {model} replies" if model else "then its episode ends"
        say(f"the traces are conversations: their users talk, until the agent leaves what was recorded; {then}")
    return user


def _play(gym: DreamGym, policy: BaseChatModel, number: int) -> list[Trajectory]:
    """Play tasks in the dream and report the success. Held-out ones if a language model judges."""
    dream, tasks = gym.experiment.dream(), gym.tasks("train")
    judged = gym.tasks("validation") or tasks
    if not dream.language_models:
        judged = [task for task in tasks if dream.decides_by_traces(task)]
        say(
            f"{len(judged)} of {len(tasks)} tasks are judged by a recorded success that called a writing tool; "
            "--experience-model, or verify_dream= in code, judges the others too"
        )
    if not judged:
        raise ConfigurationError(
            "no recorded success judges any task, and there is no experience model that could: import traces with their "
            f"outcome (dreamgym import --help), or give --experience-model, e.g. {EXAMPLE_MODEL}"
        )
    sample = Random(0).sample(judged, min(number, len(judged)))
    try:
        rate, episodes = gym.evaluate(policy, tasks=sample)
    except EpisodesMissing as error:
        hint = input_hint(gym.world.graph)
        text = re.sub(r"then evaluate\(.*", "then run this again", str(error))
        raise EpisodesMissing(f"{text}. The graph is given a message alone, but {hint}" if hint else text) from None
    say(f"{gym.world.path} in the dream: success {rate} on {len(sample)} tasks, with its 95 % interval", "bold")
    _say_deciders(episodes)
    return episodes


def _say_parts(examination: Examination) -> None:
    """Report how the dream handles the agent's parts."""
    kinds = Counter((part.handling, part.kind) for part in examination.parts)
    for handling in dict.fromkeys(part.handling for part in examination.parts):
        parts = ", ".join(f"{n} {kind}{'s' * (n > 1)}" for (way, kind), n in kinds.items() if way == handling)
        say(f"{handling}: {parts}", "red" if any(part.handling == handling for part in examination.problems) else "")
    if examination.writes_line:
        say(examination.writes_line)


def _say_deciders(episodes: Sequence[Trajectory]) -> None:
    """Report the shares of the parts that answered calls, and the number of unanswered episodes."""
    steps = (step for each in episodes for step in each.steps if step.decided_by)
    names = Counter(DECIDERS.get(step.decided_by, step.decided_by) for step in steps)
    total = max(sum(names.values()), 1)
    shares = ", ".join(f"{name} {number / total:.0%}" for name, number in names.most_common())
    unanswered = sum(is_unanswered(each.error) for each in episodes)
    others = [each.error for each in episodes if each.error is not None and not is_unanswered(each.error)]
    ends = [f"{unanswered} episodes ended at a call that nothing in the dream answers"] * bool(unanswered)
    ends += [f"{len(others)} failed otherwise: {each}" for each in others[:1]]
    say("; ".join([f"answered by: {shares}", *ends]))


def _say_gate(gym: DreamGym) -> None:
    """Report the gate's decision about this dream, and its reasons."""
    judgement, limit = gym.fidelity(limit=LIMIT), gym.experiment.settings.max_false_success
    causes = list(gate.refusals(judgement, 1.0 if limit is None else limit))
    judged = any(part.role == "judge" and part.errors for part in judgement.parts)
    unknown = "" if judged else "; no judge could be measured, so it is not known whether this dream rewards failures"
    say(f"\nthe gate would {'refuse to train' if causes else 'let you train'} in this dream{unknown}", "bold")
    say(f"    measured: {gate.summary(judgement)}")
    for cause in causes:
        say(f"    it refuses because {cause}", "yellow")
    if examples := gate.examples(judgement):
        say(f"    {examples}", "dim")


def _say_cost(gym: DreamGym, sums: Mapping[str, float]) -> None:
    """Report the model calls of the episodes and the gate. Args: `sums`, of the agent's model (`Meter`)."""
    tokens = sums["input_tokens"] + sums["output_tokens"]
    costs = [f"the agent's model {sums['calls']:,.0f} calls, {f'{tokens:,.0f}' if tokens else 'unreported'} tokens"]
    spent = (each.usage.limited for each in gym.experiment.dream().hosted)
    costs += [f"the dream's hosted models {each['calls']:,} calls, {each['tokens']:,} tokens" for each in spent]
    say(f"\ncost: {'; '.join(costs)}{'' if len(costs) > 1 else '; the dream asked no hosted model'}")


# --- init ------------------------------------------------------------------------------------------------------------------


def init(
    agent: Agent,
    traces: Source,
    to: Annotated[Path, typer.Option(help="The file to write.")] = Path("train.py"),
    experience_model: Experience = None,
    writes: Writes = None,
    isolation: Isolated = None,
    pass_through: PassThrough = None,
    simulate_node: SimulateNode = None,
) -> None:
    """Write a commented train.py for your agent.

    It names the traces, the tools that write, and held-out tasks, and has stubs of the reset and check of the real system."""
    options = chosen(isolation=isolation, pass_through=pass_through, simulate_nodes=simulate_node)
    with errors_shown():
        if to.exists():
            raise ConfigurationError(f"{to} exists: give another file (--to), or remove it")
        with ReplayBuffer(":memory:") as buffer:
            buffer.extend(_read(traces))
            has_user = recorded_user(buffer) is not None
            world = AgentWorld(agent, writes=writes or None, context={}, **options)  # no episode is played
            names, fields = sorted(world.writing_tools(buffer)), required_context(world.graph)
        stored, template = is_replay_buffer(traces), files("dreamgym_lg") / "templates" / "train.py.txt"
        text = template.read_text(encoding="utf-8").format(
            file=to,
            agent=agent,
            writes=json.dumps(names),
            traces=traces,
            buffer=traces if stored else "replay.db",
            model=experience_model or EXAMPLE_MODEL,
            user_model=f", {json.dumps(experience_model)}" if experience_model else "",
            only=experience_model is None,
            fields=", ".join(f"{name}=FILL_IN" for name in fields),
            **{"#load": "# " * stored, "#model": "# " * (not experience_model), "#dream": "# " * bool(experience_model)},
            **{"#context": "# " * (not fields), "context": ", context=CONTEXT" * bool(fields)},
            **{"#options": "# " * (not options), "options": ", **OPTIONS" * bool(options)},
            played=", ".join(f"{name}={json.dumps(value)}" for name, value in options.items()) or "pass_through=[]",
            **{"#user": "# " * (not has_user), "user": ", user=user" * has_user},
            user_real=", user_real=ScriptedUser(reply_real)" * has_user,
            **{"#model_user": "# " * (not has_user or not experience_model)},
        )
        with writing(to):
            to.write_text(text)
    say(f"{to} is written. Check `WRITES` there{' and fill in `CONTEXT`' if fields else ''}; then: python {to}")
