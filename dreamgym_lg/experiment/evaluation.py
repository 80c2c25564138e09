"""Evaluation of policies, on validation tasks while training and on held-out tasks as the proof."""

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.dream import Dream
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment.experience_models import policy_version, saved_sampling
from dreamgym_lg.experiment.workspace import TRAIN, Workspace
from dreamgym_lg.files import write_whole
from dreamgym_lg.replay.rows import FAILED
from dreamgym_lg.report.proof import BASELINES, ENOUGH, MIN_TASKS, POLICIES, read_claim
from dreamgym_lg.rollout import check_played, real_steps
from dreamgym_lg.statistics import paired_interval, wilson
from dreamgym_lg.token_recorder import TrainablePolicy
from dreamgym_lg.types import Task, Trajectory, is_unanswered

Played = TypeVar("Played")

DREAMED = "sampled"
"""The mode that is dreamed too, beside `greedy`. It is the one that was trained, and dreamed episodes are expensive."""
_FIRST = 10
"""Dreamed episodes of an evaluation behind which no further ones are played, if none was answered to its end."""
_VALIDATED = "validate/real"
ADVICE = "advice"
"""Record of the advice before training."""
START = "stage/base/start"
"""Record of the weights that the base policy began with."""
_SAMPLING = "stage/train/sampling"
"""Record of the mode that validation found best for the trained policy."""
FILTERED = "stage/filtered/data"
"""Record of the number of episodes that the filtered policy imitated. 0 where there was nothing to filter."""
OFFLINE_RL = "stage/offline_rl/data"
"""Record of how the policy of offline RL was trained. Empty where there was nothing to prefer."""
STARTED = "stage/train/baseline"
"""Record of the baseline that training began with, where no policy was given."""
STAGES = ("collect", "experience", "user", "base", "filtered", "offline_rl", "drawn", "train", "prove")


def validate(work: Workspace, policy: BaseChatModel, dream: Dream | None, iteration: int) -> dict[str, Any]:
    """Play the validation tasks, dreamed and, as far as `real_budget` goes, real. Returns metrics of the training graph.

    With `references_only` nothing is dreamed here: no recorded success judges a validation task. Nor is anything while training
    is real (`dream` is None).
    """
    tasks, dreamed, figures, parts = work.validation_tasks(), list[Trajectory](), dict[str, Any](), list[str]()
    panel = tasks[: _affordable(work, iteration)]
    plays = {"real": work.aplay(_VALIDATED, policy, panel, iteration=iteration)} if panel else {}
    if dream is not None and not work.settings.references_only:
        plays["dream"] = _dreamed(work, "validate/dream", policy, tasks, dream, iteration=iteration)
    played = dict(zip(plays, _at_once(*plays.values()), strict=True))
    if "dream" in played:
        dreamed = check_dreamed(work, played["dream"])
    if dreamed:
        figures = {f"eval_dream_{key}": value for key, value in _counts(dreamed).items()}
        on = f" (on the same tasks {_of(dreamed[: len(panel)])})" if 0 < len(panel) < len(tasks) else ""
        parts.append(f"dream {_of(dreamed)}{on}{'' if panel else ' (dreamed only)'}")
    if panel:
        real = check_played(played["real"])
        figures |= {f"eval_real_{key}": value for key, value in _counts(real).items()}
        parts.append(f"real {_of(real)}")
        if dreamed:
            figures |= (gap := _compare(dreamed[: len(panel)], real))
            parts.append("gap {eval_gap:+.2f} [{eval_gap_low:+.2f}, {eval_gap_high:+.2f}]".format_map(gap))
    elif work.settings.real_budget:
        parts.append(f"real_budget={work.settings.real_budget} is spent: no real episode was played")
    if parts:
        work.say(f"after {iteration} iterations: {', '.join(parts)}")
    return figures


def _at_once(*plays: Coroutine[Any, Any, Played]) -> list[Played]:
    """Wait for all. While the experience model computes for a dream, the policy plays in reality."""

    async def gathered() -> list[Played]:
        tasks = [asyncio.create_task(play) for play in plays]
        try:
            return await asyncio.gather(*tasks)
        finally:  # where one raises, the other plays no further episode
            for task in tasks:
                task.cancel()

    return run_lasting(gathered())


def _compare(dreamed: Sequence[Trajectory], real: Sequence[Trajectory]) -> dict[str, float]:
    """The gap to reality, on the same tasks in the same order."""
    pairs = [(one.success, other.success) for one, other in zip(dreamed, real, strict=True)]
    low, high = paired_interval(pairs)
    return {"eval_gap": sum(one - other for one, other in pairs) / len(pairs), "eval_gap_low": low, "eval_gap_high": high}


def _of(episodes: Sequence[Trajectory]) -> str:
    return f"{sum(episode.success for episode in episodes)}/{len(episodes)}"


def _affordable(work: Workspace, iteration: int) -> int | None:
    """Number of real validation tasks of this evaluation. None for all of them."""
    s = work.settings
    if s.real_budget is None:
        return None
    panel = min(s.real_budget // planned_evaluations(work), len(work.validation_tasks()))
    played = work.replay_buffer.trajectories(run=work.run_name(_VALIDATED), errors=False)
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


class BestPolicy:
    """The best policy on the validation tasks so far, in `models/NAME`. Ties go to the newest."""

    def __init__(self, work: Workspace, name: str) -> None:
        self.work, self.name = work, name

    @property
    def folder(self) -> Path:
        return self.work.models / self.name

    @property
    def figures(self) -> dict[str, Any]:
        """`at`, `successes` and `reward` of the best; empty without one."""
        return self.work.record(f"best/{self.name}")

    def offer(self, at: int, successes: float, reward: float, policy: TrainablePolicy) -> None:
        """Keep this policy if it is the best so far. An earlier one wins with more successes or, with as many, more reward.

        Args: `successes`, how many or, where not every evaluation has the same number of tasks, their share.
        """
        if not (best := self.figures) or (successes, reward) >= (best["successes"], best["reward"]):
            policy.save(self.folder)
            self.work.keep_record(f"best/{self.name}", {"at": at, "successes": successes, "reward": reward})


def validated(work: Workspace, name: str) -> int | None:
    """Successes of the baseline `models/NAME` on the validation tasks, if they were played."""
    best = BestPolicy(work, work.record(f"stage/{name}/best").get("folder", "")).figures
    return int(best["successes"]) if best else None


def start_baseline(work: Workspace) -> str:
    """The folder of the baseline that training begins with, or began with.

    It is the one with the most successes of those that played base's validation tasks. Of equals, the first of `BASELINES`.
    """
    if (work.out / "training.db").exists():
        return str(work.record(STARTED).get("name", "base"))
    played = work.record("stage/base/best").get("validation")
    same = [name for name in BASELINES if work.record(f"stage/{name}/best").get("validation") == played]
    trained = [name for name in same if (work.models / name).exists()]
    return max(trained, key=lambda name: -1 if (won := validated(work, name)) is None else won, default="base")


def prove(work: Workspace) -> dict[str, Any]:
    """Play every policy of the folder on the held-out tasks. Real, and dreamed as sampled.

    Sampled is at the trained policy's temperature. The weights before any training are played too. The validation tasks, really
    played, choose the policy and the mode that `export` takes (`kept_policy`); the held-out ones choose nothing. Nothing is
    dreamed where there is no experience model, as after a training in the real environment alone.

    Writes `result.json`. Raises `ConfigurationError` without a trained policy or a held-out task.
    """
    if not (work.models / "trained").exists():
        raise ConfigurationError(f"{work.out} holds no trained policy: call train() (`dreamgym train`) first")
    if not work.tasks("test"):
        raise ConfigurationError(f"{work.world.name} has no task of the split 'test' to prove anything on")
    figures, began = play_policies(work), _began(work)
    made_with = work.stored_settings() or work.settings
    result = {
        "world": work.world.name,
        "seed": made_with.seed,
        "temperature": _temperature(work),
        "version": version("dreamgym-lg"),
        "iterations": made_with.iterations,
        "assisted": work.world.assisted and _is_dreamed(work),
        "isolation": work.world.promises,
        **figures,
        "real_steps": count_real_steps(work),
        "filtered": work.record(FILTERED).get("episodes"),
        "offline_rl": work.record(OFFLINE_RL).get("how"),
        "began": began,
        "advice": work.record(ADVICE) or None,
        "drawn": sum(bool(task.drawn) for task in work.tasks("train")),
        "seconds": {name: work.seconds(name) for name in STAGES},
        "settings": asdict(made_with),
    }
    policy, mode, why = _chosen(result)
    result["keep"] = {"policy": policy, "mode": mode, "why": why, "instead_of": policy_version(work.models / "trained")}
    if policy != "trained":
        told = f"{ENOUGH}: " if len(work.validation_tasks()) >= MIN_TASKS else ""
        work.say(f"{told}{why}. The policy {policy!r} is kept, which `export` takes")
    write_whole(work.out / "result.json", json.dumps(result, indent=2))
    return result


def play_policies(work: Workspace) -> dict[str, Any]:
    """Play every policy of the folder for `prove`; what is stored is not played again. Returns its figures by panel."""
    figures: dict[str, Any] = {"real": {}, "dream": {}, "validation": {}}
    dream = work.dream() if _is_dreamed(work) else None
    policies, dreamed = _policies(work), ("base", _began(work), "trained")
    with work.stage("prove"):
        for number, (name, path) in enumerate(policies.items(), start=1):
            _prove_policy(work, figures, name, path, dream if name in dreamed else None)
            work.progress("prove in the real environment", number, len(policies))
    return figures


def _is_dreamed(work: Workspace) -> bool:
    """True where a proof dreams too. Under `references_only` no judge decides a held-out task."""
    return work.can_dream and not work.settings.references_only


def _began(work: Workspace) -> str:
    """The baseline that training begins with; empty for a policy that training was given."""
    return "" if work.record("stage/train/from") else start_baseline(work)


def _policies(work: Workspace) -> dict[str, str | Path]:
    """Where the policies of a proof are, by stage. A policy that training was given is its start, and no imitation."""
    paths: dict[str, str | Path] = {name: work.models / name for name in POLICIES if (work.models / name).exists()}
    if start := work.record(START):
        return {"start": start["path"], **paths}
    return {"start" if work.record("stage/train/from") and name == "base" else name: path for name, path in paths.items()}


def _chosen(result: Mapping[str, Any]) -> tuple[str, str, str]:
    """Policy, mode, and why: most successes on the validation tasks. Of equals, imitation, then greedy.

    Without a validation success, the policy is the one that the claim names (`ENOUGH`).
    """
    played = {(name, mode): each for name, modes in result["validation"].items() for mode, each in modes.items()}
    best = max(played, key=lambda key: (played[key]["successes"], key[0] != "trained", key[1] == "greedy"), default=None)
    if best is None or not played[best]["successes"]:
        claim = read_claim(result)
        return claim.baseline if claim.enough else "trained", "sampled", f"{claim.why} (no validation task tells)"
    figures = (f"{name} ({mode}) {each['successes']}" for (name, mode), each in played.items())
    return *best, f"successes on {played[best]['episodes']} real validation tasks: {', '.join(figures)}"


def choose_sampling(work: Workspace, policy: Any, dream: Dream | None) -> None:
    """Choose by validation whether `export` is greedy or samples as trained (`kept_policy`).

    In reality where all validation is (`real_budget=None`), else in the dream.
    """
    tasks, s, version = work.validation_tasks(), work.settings, policy_version(work.models / "trained")
    place, world = ("real", None) if s.real_budget is None else ("dream", dream)
    if not tasks or (place == "dream" and (dream is None or s.references_only)):
        return
    played = {}
    for mode, temperature in {"greedy": 0.0, "sampled": policy.temperature}.items():
        # really as the proof: what is stored is not played again
        run = f"proof/validation/trained/{mode}/{version}" if place == "real" else f"validate/dream/{mode}/{version}"
        played[mode] = check_played(work.play(run, policy.with_temperature(temperature), tasks, dream=world))
    successes = {mode: sum(each.success for each in episodes) for mode, episodes in played.items()}
    mode = "greedy" if successes["greedy"] >= max(successes["sampled"], 1) else "sampled"
    figures = ", ".join(f"{mode} {number}" for mode, number in successes.items())
    why = f"successes on {len(tasks)} validation tasks ({place}): {figures}"
    work.keep_record(_SAMPLING, {"mode": mode, "why": why, "instead_of": version})
    work.say(f"{why}; export is {'greedy' if mode == 'greedy' else f'at temperature {policy.temperature:g}'}")


def kept_policy(work: Workspace) -> Mapping[str, str]:
    """The `policy` to export, its `mode`, and `why`. As the last proof chose, else the trained one as validation did.

    Empty before training.
    """
    trained, file = work.models / "trained", work.out / "result.json"
    if not trained.exists():
        return {}
    proven = json.loads(file.read_text()).get("keep") if file.exists() else None
    for keep in (proven, work.record(_SAMPLING)):
        if keep and "mode" in keep and keep["instead_of"] == policy_version(trained):
            return {"policy": "trained", **keep}
    return {"policy": "trained", "mode": "sampled", "why": "as in training"}


def _temperature(work: Workspace) -> float:
    """At which a proof samples every policy: as the trained one was trained."""
    return float(saved_sampling(work.models / "trained").get("temperature", 1))


def _prove_policy(work: Workspace, figures: dict[str, Any], name: str, path: str | Path, dream: Dream | None) -> None:
    """Play one policy in every mode, dreamed meanwhile. Stored episodes are not played again."""
    loaded: Any = work.policy_at(path)
    held_out = work.tasks("test")[: work.settings.proof_tasks]
    modes = ({} if name == "start" else {"greedy": 0.0}) | {DREAMED: _temperature(work)}
    policies = {mode: loaded.with_temperature(temperature) for mode, temperature in modes.items()}
    # a policy or an experience model that was trained further is another one, whose episodes are stored beside the others
    versions = {mode: f"{name}/{mode}/{policy_version(loaded)}" for mode in modes}
    panels = {"real": held_out, "validation": [] if name == "start" else work.validation_tasks()}

    async def in_reality() -> dict[tuple[str, str], list[Trajectory]]:
        runs = [(panel, mode) for mode in modes for panel in panels if panels[panel]]
        plays = {key: (f"proof/{key[0]}/{versions[key[1]]}", policies[key[1]], panels[key[0]]) for key in runs}
        return {key: check_played(await work.aplay(*play)) for key, play in plays.items()}

    async def in_the_dream() -> dict[tuple[str, str], list[Trajectory]]:
        if dream is None:
            return {}
        run = f"proof/dream@{dream.version}/{versions[DREAMED]}"
        episodes = check_dreamed(work, await _dreamed(work, run, policies[DREAMED], held_out, dream))
        return {("dream", DREAMED): episodes} if episodes else {}

    played, dreamed = _at_once(in_reality(), in_the_dream())
    for (panel, mode), episodes in {**played, **dreamed}.items():
        figures[panel].setdefault(name, {})[mode] = summarise(episodes)
    for mode in modes:
        figures["real"][name][mode]["outcomes"] = {each.task.id: each.success for each in played["real", mode]}


async def _dreamed(
    work: Workspace, run: str, policy: Any, tasks: Sequence[Task], dream: Dream, **options: Any
) -> list[Trajectory]:
    """Play tasks in the dream. No more than `_FIRST` of them where traces alone answer and know nothing about these."""
    if not dream.language_models:
        first = await work.aplay(run, policy, tasks[:_FIRST], dream=dream, **options)
        if first and all(is_unanswered(each.error) for each in first):
            return first
    return await work.aplay(run, policy, tasks, dream=dream, **options)


def check_dreamed(work: Workspace, episodes: list[Trajectory]) -> list[Trajectory]:
    """Dreamed episodes of an evaluation; none if the dream answered none to its end.

    Says which failed. Raises `EpisodesMissing` as `check_played` does.
    """
    if episodes and all(is_unanswered(episode.error) for episode in episodes):
        work.say(f"nothing was evaluated in the dream: it answers none of {len(episodes)} episodes; {episodes[0].error}")
        return []
    say_unreadable(work, check_played(episodes))
    return episodes


def say_unreadable(work: Workspace, episodes: Sequence[Trajectory]) -> None:
    """Report dreamed episodes that could not be played to their end."""
    if failed := [str(episode.error) for episode in episodes if episode.error]:
        work.say(
            f"{len(failed)} of {len(episodes)} dreamed episodes could not be played to their end, and count as no success; the "
            f"first: {failed[0]}"
        )


def summarise(trajectories: Sequence[Trajectory]) -> dict[str, int | float | list[float]]:
    """Successes with Wilson's 95 % interval, invalid-action share and failed rollouts (no successes)."""
    successes, episodes = sum(trajectory.success for trajectory in trajectories), len(trajectories)
    steps = sum(len(trajectory.steps) for trajectory in trajectories)
    return {
        "successes": successes,
        "episodes": episodes,
        "interval": list(wilson(successes, episodes)),
        "invalid_action_share": sum(trajectory.invalid_actions for trajectory in trajectories) / max(steps, 1),
        "reward_mean": sum(trajectory.reward for trajectory in trajectories) / max(episodes, 1),
        "failed": sum(trajectory.error is not None for trajectory in trajectories),
    }


def count_real_steps(work: Workspace) -> dict[str, int]:
    """All real steps of the experiment's records, by their purpose."""
    counts, own = {"offline": 0, "train": 0, "evaluation": 0}, work.run_name("")
    for trajectory in work.replay_buffer.trajectories(source="offline"):
        counts["offline"] += real_steps([trajectory])
    for trajectory in work.replay_buffer.trajectories(source="real"):
        if trajectory.run.startswith(own):  # else another experiment's, in a shared buffer
            name = trajectory.run.partition(FAILED)[0].rpartition("/")[2]
            counts[name if name in counts else "evaluation"] += real_steps([trajectory])
    return counts


def shown_episodes(work: Workspace) -> list[Trajectory]:
    """Some dreamed episodes of the first and last iterations, and the trained policy's real ones."""
    buffer, train = work.replay_buffer, work.run_name(TRAIN)
    iterations = [row["iteration"] for row in buffer.metrics(train)]
    dreamed = [
        trajectory
        for iteration in dict.fromkeys([*iterations[:1], *iterations[-1:]])
        for trajectory in buffer.trajectories(run=train, iteration=iteration, limit=3)
    ]
    proven = work.run_name(f"proof/real/trained/sampled/{policy_version(work.models / 'trained')}")
    return [*dreamed, *buffer.trajectories(run=proven, limit=3)]
