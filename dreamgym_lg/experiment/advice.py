"""Advice before a training: whether a dream can add to imitation of the same traces."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from random import Random
from typing import TYPE_CHECKING, Literal, NamedTuple

from dreamgym_lg.actions import parse_call
from dreamgym_lg.dream import Dream
from dreamgym_lg.dream.relative import compare_groups
from dreamgym_lg.errors import UntruthfulDream
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment import gate
from dreamgym_lg.experiment.choice import validation_panel, validation_successes
from dreamgym_lg.experiment.evaluation import ADVICE, START
from dreamgym_lg.experiment.experience_models import policy_version
from dreamgym_lg.experiment.workspace import Workspace
from dreamgym_lg.learner import has_learning_signal
from dreamgym_lg.report.proof import BASELINES, LABELS
from dreamgym_lg.rollout import check_played
from dreamgym_lg.statistics import wilson
from dreamgym_lg.types import Task, Trajectory, is_missing, lacks_answers

if TYPE_CHECKING:
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

MAX_LOST = 0.2
"""Maximum share of lost tasks (its upper 95 % bound) that leaves nothing to improve."""
MAX_USELESS = 0.75
"""Largest share of dreamed groups without a learning signal at which training is advised."""
MAX_GROUPS = 32
"""Maximum groups that are played for an advice."""


Useful = Callable[[Sequence[Trajectory]], bool]


class Advice(NamedTuple):
    """Train in the dream, collect more traces, or stop at imitation; and why."""

    verdict: Literal["train", "collect", "stop"]
    why: str


def conclude(
    best: int, tasks: int, groups: Sequence[Sequence[Trajectory]] = (), refusal: str = "", useful: Useful = has_learning_signal
) -> Advice:
    """The advice that follows from figures.

    Args: `best`, the best baseline's number of successes on `tasks` validation tasks; `groups`, of a dreamed iteration;
        `refusal`, the gate's reason against the dream; `useful`, tells if the learner can learn from a group.
    """
    useless = [group for group in groups if not useful(group)]
    failed = [group for group in useless if not has_success(group)]
    if refusal:
        return Advice("collect", refusal)
    if tasks and not best:
        return Advice("collect", "episodes that all fail teach a dream nothing: import more successes, or take a larger model")
    if wilson(tasks - best, tasks)[1] <= MAX_LOST:
        return Advice("stop", f"the best policy loses {tasks - best} of {tasks} validation tasks, too few to train for")
    if len(useless) <= MAX_USELESS * len(groups):
        return Advice("train", "train() may add to it, and prove() tells whether it did")
    if 2 * len(failed) <= len(useless):
        return Advice("stop", "the dream rewards nearly all that imitation does")
    unanswered = sum(map(lacks_answers, failed))
    calls = f" and traces of calls that the dream cannot answer (in {unanswered} of {len(groups)} groups)" if unanswered else ""
    ids = ", ".join(group[0].task.id for group in failed[:3])
    return Advice("collect", f"import successes{calls} for tasks like {ids}")


def advise(work: Workspace, policy: "LocalChatModel") -> Advice:
    """Advise before a training that begins with `policy`, and report the figures behind the advice.

    Plays the validation tasks with the untrained weights, and the groups of one iteration in the dream. The advice is kept for
    the proof (`result.json`); once training has begun, the kept one is returned.
    """
    if work.training_began and (kept := work.record(ADVICE)):
        return Advice(kept["verdict"], kept["why"])
    s, tasks = work.settings, work.validation_tasks()
    dream = None if s.environment == "real" else work.dream()
    successes = [each for each in work.offline() if each.success]
    won = _won_without_a_dream(work, policy, dream)
    groups, refusal, lost = list[Sequence[Trajectory]](), "", list[str]()
    if dream is not None:
        try:
            gate.check_truthful(work)
        except UntruthfulDream as error:
            refusal = f"the gate refuses the dream: {error}"
        trainable = gate.trainable_tasks(work)
        lost = underrepresented_tools(successes, trainable, work.world.writing_tools(work.replay_buffer))
        groups = _play_groups(work, policy, dream, trainable)
    by_learner: dict[str, Useful] = {"rft": has_success, "ppo": bool}  # PPO's critic needs no second episode
    useful = by_learner.get(s.learner, has_learning_signal)
    advice = conclude(max(won.values(), default=0), len(tasks) if won else 0, groups, refusal, useful)
    if lost and advice.verdict == "train":
        advice = Advice("collect", f"drawn tasks hardly call {', '.join(lost)}, and training unlearns that: import such calls")
    figures = [f"{LABELS[name]} {number} of {len(tasks)} validation tasks" for name, number in won.items()]
    figures += _useless_groups(groups, useful)
    figures += _second_tries(groups, {each.task.id for each in successes}) if s.learner != "rft" else []
    work.say(f"advice: {advice.verdict}. {'; '.join(figures)}. {advice.why}")
    if not work.training_began:
        work.keep_record(ADVICE, {**advice._asdict(), "figures": "; ".join(figures), "learner": s.learner})
    return advice


def _won_without_a_dream(work: Workspace, policy: "LocalChatModel", dream: Dream | None) -> dict[str, int]:
    """Validation successes of each policy without a dream: the baselines and the untrained weights.

    Empty, which is reported, where the baselines were not all validated on the present tasks.
    """
    s, tasks, real = work.settings, work.validation_tasks(), work.settings.real_budget != 0
    won = {name: number for name in BASELINES if (number := validation_successes(work, name)) is not None}
    panels = {str(work.record(f"stage/{name}/best").get("validation")) for name in won}
    if panels - {panel := validation_panel(work)}:
        before = ", ".join(sorted(panels))
        work.say(f"the advice leaves out validation, as the baselines had other tasks (now {panel}, then {before})")
        return {}
    if not tasks or not (real or (dream is not None and not s.references_only)):
        return won
    path = work.record(START).get("path")
    start = policy if path is None else work.policy_at(path)
    dream, suffix = (None, "") if dream is None or real else (dream, f"/dream@{dream.version}")
    played = _check_reached(work.play(f"validate/start/{policy_version(start)}{suffix}", start, tasks, dream=dream))
    return {"start": sum(each.success for each in played), **won}


def _play_groups(work: Workspace, policy: "LocalChatModel", dream: Dream, tasks: Sequence[Task]) -> list[Sequence[Trajectory]]:
    """Play the groups of one training iteration in the dream."""
    s, run = work.settings, f"advice/{policy_version(policy)}/dream@{dream.version}"
    sample = Random(s.seed).sample(tasks, min(s.num_tasks, len(tasks), MAX_GROUPS))
    dream = dream.judged_by_traces() if s.references_only else dream
    played = _check_reached(work.play(run, policy, sample, dream=dream, num_generations=s.num_generations))
    played = run_lasting(compare_groups(dream, played, work.replay_buffer))
    return [played[i : i + s.num_generations] for i in range(0, len(played), s.num_generations)]


def _check_reached(episodes: list[Trajectory]) -> list[Trajectory]:
    """Raises `EpisodesMissing` if an episode was stopped from outside. Others may all fail: that is a figure too."""
    return check_played(episodes) if any(is_missing(each.error) for each in episodes) else episodes


def _useless_groups(groups: Sequence[Sequence[Trajectory]], useful: Useful) -> list[str]:
    """A line about groups that teach nothing, if any was played."""
    useless = [group for group in groups if not useful(group)]
    unanswered = f", {number} of them because the dream did not answer" if (number := sum(map(lacks_answers, useless))) else ""
    return [f"{len(useless)} of {len(groups)} dreamed groups teach nothing{unanswered}"] if groups else []


def _second_tries(groups: Sequence[Sequence[Trajectory]], solved: Collection[str]) -> list[str]:
    """A line about tasks that no trace solves and the dream does, if any."""
    unsolved = [group for group in groups if group[0].task.id not in solved and not group[0].task.drawn]
    number = sum(map(has_success, unsolved))
    line = f"the dream solves {number} of {len(unsolved)} tasks that no trace solves, and learner='rft' would imitate them"
    return [line] if number else []


def has_success(group: Sequence[Trajectory]) -> bool:
    return any(each.success for each in group)


def underrepresented_tools(successes: Sequence[Trajectory], tasks: Sequence[Task], writes: Collection[str]) -> list[str]:
    """Writing tools that tasks need less than half as often as recorded `successes` call them.

    Only tools that at least three tasks would be expected to need; none without a drawn task.
    """
    recorded = {each.task.id: _tools(step.action for step in each.steps) for each in successes}
    needed = [_tools(a for a, _ in each.drawn["steps"]) if each.drawn else recorded.get(each.id, set()) for each in tasks]
    calls, needs = (Counter(tool for tools in each for tool in tools) for each in (recorded.values(), needed))
    expected = {tool: calls[tool] * len(tasks) / max(len(recorded), 1) for tool in writes}
    return sorted(t for t in writes if any(each.drawn for each in tasks) and expected[t] >= max(3, 2 * needs[t] + 1e-9))


def _tools(actions: Iterable[str]) -> set[str]:
    return {call.name for action in actions if (call := parse_call(action)) is not None}
