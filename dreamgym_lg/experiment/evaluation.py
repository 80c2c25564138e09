"""Evaluation of policies, on validation tasks while training and on held-out tasks as the proof."""

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.dream import Dream
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment.choice import choose_policy, no_policy, resulting_policy, start_baseline
from dreamgym_lg.experiment.experience_models import policy_version, saved_sampling
from dreamgym_lg.experiment.lock import only_process
from dreamgym_lg.experiment.workspace import TRAIN, Workspace
from dreamgym_lg.files import write_whole
from dreamgym_lg.replay.rows import FAILED
from dreamgym_lg.report.proof import ENOUGH, MIN_TASKS, POLICIES
from dreamgym_lg.rollout import check_played, real_steps
from dreamgym_lg.splits import sharing
from dreamgym_lg.statistics import paired_interval, wilson
from dreamgym_lg.types import Task, Trajectory, is_unanswered

Result = TypeVar("Result")

DREAMED = "sampled"
"""The mode of a proof that is also dreamed, being the one that was trained. Dreaming `greedy` too would be expensive."""
_PROBE_EPISODES = 10
"""Number of first episodes of a dreamed evaluation, which ends if all lack answers."""
_REAL_VALIDATION = "validate/real"
ADVICE = "advice"
"""Record of the advice before training."""
START = "stage/base/start"
"""Record of the path and name of the weights that all policies of a folder begin with."""
START_POLICY = "stage/train/from"
"""Record of the version, name and path of the `policy=` that training began with, where it was no baseline."""
FILTERED = "stage/filtered/data"
"""Record of the number of episodes that the filtered policy imitated. 0 where there was nothing to filter."""
OFFLINE_RL = "stage/offline_rl/data"
"""Record of how the policy of offline RL was trained. Empty where there was nothing to prefer."""
STAGES = ("collect", "experience", "user", "base", "filtered", "offline_rl", "drawn", "train", "prove")


def validate(work: Workspace, policy: BaseChatModel, dream: Dream | None, iteration: int) -> dict[str, Any]:
    """Play the validation tasks, dreamed and, as far as `real_budget` goes, real. Returns metrics of the training graph.

    Nothing is dreamed while training is real (`dream` is None), nor with `references_only`: no recorded success judges a
    validation task.
    """
    tasks, figures, parts = work.validation_tasks(), dict[str, Any](), list[str]()
    panel = tasks[: _real_task_limit(work, iteration)]
    plays = {"real": work.aplay(_REAL_VALIDATION, policy, panel, iteration=iteration)} if panel else {}
    if dream is not None and not work.settings.references_only:
        plays["dream"] = _play_in_dream(work, "validate/dream", policy, tasks, dream, iteration=iteration)
    played = dict(zip(plays, _run_concurrently(*plays.values()), strict=True))
    if dreamed := check_dreamed(work, played["dream"]) if "dream" in played else []:
        figures = {f"eval_dream_{key}": value for key, value in _counts(dreamed).items()}
        same = f" (on the same tasks {_fraction(dreamed[: len(panel)])})" if 0 < len(panel) < len(tasks) else ""
        parts.append(f"dream {_fraction(dreamed)}{same}{'' if panel else ' (dreamed only)'}")
    if panel:
        real = check_played(played["real"])
        figures |= {f"eval_real_{key}": value for key, value in _counts(real).items()}
        parts.append(f"real {_fraction(real)}")
        if dreamed:
            figures |= (gap := _gap_to_reality(dreamed[: len(panel)], real))
            parts.append("gap {eval_gap:+.2f} [{eval_gap_low:+.2f}, {eval_gap_high:+.2f}]".format_map(gap))
    elif work.settings.real_budget:
        parts.append(f"real_budget={work.settings.real_budget} is spent: no real episode was played")
    if parts:
        work.say(f"after {iteration} iterations: {', '.join(parts)}")
    return figures


def _run_concurrently(*plays: Coroutine[Any, Any, Result]) -> list[Result]:
    """Run coroutines at once. The policy plays in reality while a dream's experience model computes."""

    async def gather() -> list[Result]:
        tasks = [asyncio.create_task(play) for play in plays]
        try:
            return await asyncio.gather(*tasks)
        finally:  # an error in one stops the others
            for task in tasks:
                task.cancel()

    return run_lasting(gather())


def _gap_to_reality(dreamed: Sequence[Trajectory], real: Sequence[Trajectory]) -> dict[str, float]:
    """Dreamed minus real success with its interval, on the same tasks in the same order."""
    pairs = [(one.success, other.success) for one, other in zip(dreamed, real, strict=True)]
    low, high = paired_interval(pairs)
    return {"eval_gap": sum(one - other for one, other in pairs) / len(pairs), "eval_gap_low": low, "eval_gap_high": high}


def _fraction(episodes: Sequence[Trajectory]) -> str:
    return f"{sum(episode.success for episode in episodes)}/{len(episodes)}"


def _real_task_limit(work: Workspace, iteration: int) -> int | None:
    """Number of tasks of this evaluation that `real_budget` lets play in reality. None: all of them."""
    s = work.settings
    if s.real_budget is None:
        return None
    panel = min(s.real_budget // planned_evaluations(work), len(work.validation_tasks()))
    played = work.replay_buffer.trajectories(run=work.run_name(_REAL_VALIDATION), errors=False)
    spent = sum(trajectory.iteration != iteration for trajectory in played)
    return panel if spent + panel <= s.real_budget else 0


def planned_evaluations(work: Workspace) -> int:
    """How often a training evaluates: every `evaluate_every` iterations, and after the last."""
    return -(-work.settings.iterations // work.settings.evaluate_every)


def _counts(episodes: Sequence[Trajectory]) -> dict[str, float]:
    return {
        "successes": sum(trajectory.success for trajectory in episodes),
        "episodes": len(episodes),
        "reward_mean": sum(trajectory.reward for trajectory in episodes) / max(len(episodes), 1),
    }


def prove(work: Workspace) -> dict[str, Any]:
    """Play every policy of the folder on held-out tasks, in reality and in the dream.

    Dreamed episodes sample at the trained policy's temperature. The untrained weights are played too. Success on real
    validation tasks, never on held-out ones, chooses the policy and mode that `export` takes (`kept_policy`). Nothing is
    dreamed without an experience model, as after training in the real environment alone. Before a training, the policies
    without a dream are compared.

    Writes `result.json`. Raises `ConfigurationError` without a policy or a held-out task.
    """
    if not (name := resulting_policy(work)):
        raise ConfigurationError(no_policy(work))
    if not work.tasks("test"):
        raise ConfigurationError(f"{work.world.name} has no task of the split 'test' to prove anything on")
    figures, trained = play_policies(work), name == "trained"
    made_with = work.stored_settings() or work.settings
    result = {
        "world": work.world.name,
        "seed": made_with.seed,
        "temperature": _temperature(work),
        "version": version("dreamgym-lg"),
        "iterations": made_with.iterations if trained else 0,
        "assisted": work.world.assisted and _proves_in_dream(work),
        "isolation": work.world.promises,
        **figures,
        "shared_entities": {id: text[:80] for id, text in sharing(_held_out(work), work.tasks("train")).items()},
        "real_steps": count_real_steps(work),
        "dreamed_steps": count_dreamed_steps(work),
        "filtered": work.record(FILTERED).get("episodes"),
        "offline_rl": work.record(OFFLINE_RL).get("how"),
        "began": _training_start(work) if trained else "",
        "advice": work.record(ADVICE) or None,
        "drawn": sum(bool(task.drawn) for task in work.tasks("train")),
        "seconds": {name: work.seconds(name) for name in STAGES},
        "settings": asdict(made_with),
    }
    policy, mode, why = choose_policy(result, name)
    result["keep"] = {"policy": policy, "mode": mode, "why": why, "instead_of": policy_version(work.models / name)}
    if policy != "trained":
        claim = f"{ENOUGH}: " if trained and len(work.validation_tasks()) >= MIN_TASKS else ""
        work.say(f"{claim}{why}. The policy {policy!r} is kept, which `export` takes")
    write_whole(work.out / "result.json", json.dumps(result, indent=2))
    return result


def play_policies(work: Workspace) -> dict[str, Any]:
    """Play every policy of the folder for `prove`, except stored episodes. Returns the figures by panel."""
    figures: dict[str, Any] = {"real": {}, "dream": {}, "validation": {}}
    dream = work.dream() if _proves_in_dream(work) else None
    policies, dreamed = _policies(work), ("base", _training_start(work), "trained")
    with work.stage("prove"), only_process(work.out):  # a finished stage locks nothing
        for number, (name, path) in enumerate(policies.items(), start=1):
            _prove_policy(work, figures, name, path, dream if name in dreamed else None)
            work.progress("prove in the real environment", number, len(policies))
    return figures


def _proves_in_dream(work: Workspace) -> bool:
    """True if a proof plays in the dream too. Under `references_only` no judge decides a held-out task."""
    return work.can_dream and not work.settings.references_only


def _training_start(work: Workspace) -> str:
    """The baseline that training began with; empty if it was given another policy."""
    return "" if work.record(START_POLICY) else start_baseline(work)


def _policies(work: Workspace) -> dict[str, str | Path]:
    """Paths of a proof's policies, by stage. All begin with the stage `start`."""
    paths: dict[str, str | Path] = {name: work.models / name for name in POLICIES if (work.models / name).exists()}
    if start := work.record(START):
        return {"start": start["path"], **paths}
    return {"start" if work.record(START_POLICY) and name == "base" else name: path for name, path in paths.items()}


def _held_out(work: Workspace) -> list[Task]:
    """The tasks of a proof."""
    return work.tasks("test")[: work.settings.proof_tasks]


def _temperature(work: Workspace) -> float:
    """Sampling temperature of a proof, as of `resulting_policy`."""
    return float(saved_sampling(work.models / resulting_policy(work)).get("temperature", 1))


def _prove_policy(work: Workspace, figures: dict[str, Any], name: str, path: str | Path, dream: Dream | None) -> None:
    """Play one policy in every mode, in reality and, meanwhile, in the `dream`."""
    loaded: Any = work.policy_at(path)
    held_out = _held_out(work)
    modes = {"greedy": 0.0, DREAMED: _temperature(work)}
    policies = {mode: loaded.with_temperature(temperature) for mode, temperature in modes.items()}
    # run names hold versions, so that a model that is trained further has episodes of its own
    versions = {mode: f"{name}/{mode}/{policy_version(loaded)}" for mode in modes}
    panels = {"real": held_out, "validation": [] if name in ("start", "dreamed") else work.validation_tasks()}

    async def in_reality() -> dict[tuple[str, str], list[Trajectory]]:
        runs = [(panel, mode) for mode in modes for panel in panels if panels[panel]]
        plays = {key: (f"proof/{key[0]}/{versions[key[1]]}", policies[key[1]], panels[key[0]]) for key in runs}
        return {key: check_played(await work.aplay(*play)) for key, play in plays.items()}

    async def in_the_dream() -> dict[tuple[str, str], list[Trajectory]]:
        if dream is None:
            return {}
        run = f"proof/dream@{dream.version}/{versions[DREAMED]}"
        episodes = check_dreamed(work, await _play_in_dream(work, run, policies[DREAMED], held_out, dream))
        return {("dream", DREAMED): episodes} if episodes else {}

    played, dreamed = _run_concurrently(in_reality(), in_the_dream())
    for (panel, mode), episodes in {**played, **dreamed}.items():
        figures[panel].setdefault(name, {})[mode] = summarise(episodes)
    for mode in modes:
        figures["real"][name][mode]["outcomes"] = {each.task.id: each.success for each in played["real", mode]}


async def _play_in_dream(
    work: Workspace, run: str, policy: Any, tasks: Sequence[Task], dream: Dream, **options: Any
) -> list[Trajectory]:
    """Play tasks in the dream. Without a language model, only `_PROBE_EPISODES` if the traces can answer none of these."""
    if not dream.language_models:
        first = await work.aplay(run, policy, tasks[:_PROBE_EPISODES], dream=dream, **options)
        if first and all(is_unanswered(each.error) for each in first):
            return first
    return await work.aplay(run, policy, tasks, dream=dream, **options)


def check_dreamed(work: Workspace, episodes: list[Trajectory]) -> list[Trajectory]:
    """The dreamed episodes of an evaluation; none if the dream answered none to its end.

    Reports failed ones. Raises `EpisodesMissing` as `check_played` does.
    """
    if episodes and all(is_unanswered(episode.error) for episode in episodes):
        work.say(f"nothing was evaluated in the dream: it answers none of {len(episodes)} episodes; {episodes[0].error}")
        return []
    say_unreadable(work, check_played(episodes))
    return episodes


def say_unreadable(work: Workspace, episodes: Sequence[Trajectory]) -> None:
    """Report episodes that could not be played to their end."""
    if failed := [str(episode.error) for episode in episodes if episode.error]:
        kind = "real" if episodes[0].source == "real" else "dreamed"
        work.say(
            f"{len(failed)} of {len(episodes)} {kind} episodes could not be played to their end, and count as no success; the "
            f"first: {failed[0]}"
        )


def summarise(trajectories: Sequence[Trajectory]) -> dict[str, int | float | list[float]]:
    """Successes with Wilson's 95 % interval, invalid-action share and failed rollouts. A failed one is no success."""
    steps = sum(len(trajectory.steps) for trajectory in trajectories)
    return {
        **_counts(trajectories),
        "interval": list(wilson(sum(trajectory.success for trajectory in trajectories), len(trajectories))),
        "invalid_action_share": sum(trajectory.invalid_actions for trajectory in trajectories) / max(steps, 1),
        "failed": sum(trajectory.error is not None for trajectory in trajectories),
    }


def count_real_steps(work: Workspace) -> dict[str, int]:
    """Number of real steps in the experiment's records, by purpose."""
    counts, prefix = {"offline": 0, "train": 0, "evaluation": 0}, work.run_name("")
    for trajectory in work.replay_buffer.trajectories(source="offline"):
        counts["offline"] += real_steps([trajectory])
    for trajectory in work.replay_buffer.trajectories(source="real"):
        if trajectory.run.startswith(prefix):  # else another experiment's, in a shared buffer
            name = trajectory.run.partition(FAILED)[0].rpartition("/")[2]
            counts[name if name in counts else "evaluation"] += real_steps([trajectory])
    return counts


def count_dreamed_steps(work: Workspace) -> dict[str, Any]:
    """Training's dreamed steps by who answered (`decided_by`), and the `seconds` of their rollouts.

    Of a rollout that was interrupted, only the last process counts.
    """
    run = work.run_name(TRAIN)
    seconds = (row.get("seconds_rollout") for row in work.replay_buffer.metrics(run) if "real_steps" not in row)
    return {"decided_by": work.replay_buffer.deciders(run), "seconds": sum(filter(None, seconds))}


def shown_episodes(work: Workspace) -> list[Trajectory]:
    """Some dreamed episodes of the first and last iterations, and real ones of the `resulting_policy`."""
    buffer, train = work.replay_buffer, work.run_name(TRAIN)
    iterations = [row["iteration"] for row in buffer.metrics(train)]
    dreamed = [
        trajectory
        for iteration in dict.fromkeys([*iterations[:1], *iterations[-1:]])
        for trajectory in buffer.trajectories(run=train, iteration=iteration, limit=3)
    ]
    name = resulting_policy(work)
    proven = work.run_name(f"proof/real/{name}/sampled/{policy_version(work.models / name)}")
    return [*dreamed, *buffer.trajectories(run=proven, limit=3)]
