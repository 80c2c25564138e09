"""The prompt learner: GEPA (Agrawal et al. 2025, arXiv 2507.19457) searches, the dream plays.

Episodes and reflections are kept, and decide the search: stopped at any moment, it goes on with the same call.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any, cast

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.dream import Dream
from dreamgym_lg.errors import BudgetExceeded, ConfigurationError, MissingDependency
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment import gate
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.experiment.comparison import Comparison, Meter, Version
from dreamgym_lg.experiment.experience_models import resolve_policy
from dreamgym_lg.experiment.lock import only_process
from dreamgym_lg.experiment.workspace import Workspace, logger
from dreamgym_lg.hosted import APART, Hosted, name_of
from dreamgym_lg.production.prompts import Changes, components, difference, export_prompts, with_prompts
from dreamgym_lg.rollout import check_played
from dreamgym_lg.simulate.trial import TrialPolicy, try_out
from dreamgym_lg.types import Task, Trajectory, is_missing

try:
    import gepa
    from gepa.core.adapter import EvaluationBatch
    from gepa.utils.stop_condition import ScoreThresholdStopper
except ImportError as error:
    raise MissingDependency.extra("gepa", "gepa") from error


@dataclass(frozen=True, kw_only=True)
class ImprovedPrompts:
    """The texts that did best on the validation tasks; `print` shows a diff."""

    changes: Changes
    """Texts that differ from the original; empty where nothing did better."""
    policy: BaseChatModel
    """The chat model with the original prompts."""
    scores: tuple[float, float]
    """Mean reward on the validation tasks in the dream, before and after. The search chose by it: no proof."""
    gym: Any

    def __str__(self) -> str:
        return difference(self.changes) or "no text did better than the original"

    def compare(self, *, real: bool = False) -> Comparison:
        """Play the tasks of the split `test` with both texts, as `DreamGym.evaluate`. Stored episodes are no calls."""
        versions = list[Version]()
        for name, changes in ("original", {}), ("improved", self.changes):
            policy, run = with_prompts((meter := Meter()).attached(self.policy), changes), _run_name(self.policy, changes)
            _, played = self.gym.evaluate(policy, real=real, tasks=self.gym.tasks("test"), run=run)
            versions.append(Version.of(name, played, meter))
        return Comparison(before=versions[0], after=versions[1])

    def export(self, folder: str | Path) -> None:
        """Write the new texts, their diff and a manifest to a new folder (`export_prompts`)."""
        record = {"model": name_of(self.policy), "learner": "gepa", "scores": self.scores}
        export_prompts(self.changes, folder, record, agent=self.gym.world.source)


def improve_prompts(
    gym: Any,
    *,
    reflection: BaseChatModel | str,
    policy: BaseChatModel | str | None = None,
    episodes: int = 300,
    hosted: Hosted | None = None,
    texts: Mapping[str, str] | None = None,
    force: bool = False,
) -> ImprovedPrompts:
    """Search for better prompts of an agent in its dream. `DreamGym.improve_prompts` says what the arguments are."""
    work, world = cast(tuple[Workspace, AgentWorld], (gym.experiment, gym.world))
    acting, judge, budget = resolve_policy(policy, world.graph), resolve_policy(reflection, None), hosted or Hosted()
    work.out.mkdir(parents=True, exist_ok=True)
    with only_process(work.out):
        work.open()
        work.force = force
        gate.check_truthful(work)
        budget.keep_in(work.out / "prompts.db")
        dream, train, validation = work.dream(), gate.trainable_tasks(work), work.validation_tasks()
        if work.settings.references_only:
            dream, validation = dream.judged_by_traces(), [task for task in validation if dream.decides_by_traces(task)]
        validation = validation or train
        _, prompts = run_lasting(try_out(world.agent(TrialPolicy(), real=False)))
        originals = texts or components(prompts, world.examine().tools)
        if not originals or not train or episodes < len(validation):
            counts = f"{len(originals)} texts, {len(train)} training tasks, {len(validation)} episodes to try the originals"
            raise ConfigurationError(f"episodes={episodes}: there are {counts}; none may be 0, nor episodes= fewer")
        work.say(_plan(work, originals, budget, f"{episodes} dreamed episodes on {len(train)} training and {len(validation)}"))
        meter = Meter(budget)
        adapter = PromptAdapter(work, dream, meter.attached(acting), originals, meter.attached(judge), budget, episodes)
        best, scores = adapter.search(train, validation, work.settings.seed)
    changes = {name: (text, best[name]) for name, text in originals.items() if best[name] != text}
    rewards = f"mean reward on the tasks that chose them {scores[1]:.3f}, before {scores[0]:.3f}"
    work.say(f"{len(changes)} of {len(originals)} texts changed; {rewards}: compare() plays held-out ones")
    return ImprovedPrompts(changes=changes, policy=acting, scores=scores, gym=gym)


def _plan(work: Workspace, originals: Mapping[str, str], hosted: Hosted, most: str) -> str:
    """The line before a search: its budget, and an estimate from recorded episodes."""
    plan = f"learner gepa: at most {most} validation tasks"
    if recorded := [[(len(s.observation), len(s.action)) for s in each.steps] for each in work.offline()[:100] if each.steps]:
        base = sum(map(len, originals.values()))  # read at every call, as is what came before
        read = mean(sum(base + total for total in accumulate(map(sum, steps))) for steps in recorded) / 4  # characters
        written = mean(sum(action for _, action in steps) for steps in recorded) / 4
        tokens = f"{read + written:,.0f} tokens of the agent, {hosted.price(read, written)}"
        plan += f", each about {mean(map(len, recorded)):.1f} calls, {tokens}"
    limits = ", ".join(f"{name} {limit:g}" for name, limit in hosted.limits.items() if limit is not None)
    return f"{plan}. Limits of agent and reflection together: {limits or 'none'}; spent so far: {hosted.usage.limited}"


def _run_name(policy: BaseChatModel, changes: Changes) -> str:
    texts = sorted((name, new) for name, (original, new) in changes.items() if new != original)
    return f"prompts/{blake2b(json.dumps([name_of(policy), texts]).encode(), digest_size=8).hexdigest()}"


@dataclass
class PromptAdapter:
    """A `gepa.GEPAAdapter`, and its callback. The candidates play in the dream."""

    work: Workspace
    dream: Dream
    policy: BaseChatModel
    originals: Mapping[str, str]
    reflection: BaseChatModel
    hosted: Hosted
    episodes: int
    played: int = 0
    matched: set[str] = field(default_factory=set)
    """Components that a call of the agent's model held."""
    stopped: Exception | None = None
    propose_new_texts: None = None

    def search(self, train: list[Task], validation: list[Task], seed: int) -> tuple[Mapping[str, str], tuple[float, float]]:
        """The best texts, and the mean validation rewards of the originals and of them."""
        result: Any = gepa.optimize(
            seed_candidate=dict(self.originals),
            trainset=train,
            valset=validation,
            adapter=cast(Any, self),
            reflection_lm=self.reflect,
            use_merge=True,
            stop_callbacks=[lambda state: self.stopped is not None, ScoreThresholdStopper(1.0)],
            callbacks=[cast(Any, self)],
            logger=cast(Any, SimpleNamespace(log=logger.info)),
            track_best_outputs=False,
            seed=seed,
            raise_on_exception=False,  # a spent budget keeps the best so far; any other error is raised below
        )
        if isinstance(self.stopped, BudgetExceeded):
            self.work.say(f"the search ends: {self.stopped}")
        elif self.stopped is not None:
            raise self.stopped
        if unseen := sorted(self.originals.keys() - self.matched):
            why = "a text that each run writes anew has a part that stays, which texts={...} names"
            self.work.say(f"no call held {', '.join(unseen)} word for word, so that nothing replaced it: {why}")
        return result.candidates[result.best_idx], (result.val_aggregate_scores[0], max(result.val_aggregate_scores))

    def evaluate(self, batch: list[Task], candidate: dict[str, str], capture_traces: bool = False) -> EvaluationBatch:
        """Play one dreamed episode per task. Its reward is the score, 0 where it broke off."""
        if self.played + len(batch) > self.episodes:
            raise BudgetExceeded(f"{self.played} of episodes={self.episodes} are spent, and {len(batch)} more were next")
        changes = {name: (text, candidate[name]) for name, text in self.originals.items()}
        policy = with_prompts(self.policy, changes, matched=self.matched)
        played = self.work.play(_run_name(self.policy, changes), policy, batch, dream=self.dream)
        self.hosted.check_budget()  # an agent that catches the model's error ended its episode otherwise
        if all(is_missing(episode.error) for episode in played):
            check_played(played)  # no candidate is to blame for a model that is away
        self.played += len(batch)
        self.work.progress("improve prompts", self.played, self.episodes)
        scores = [0.0 if episode.error else episode.reward for episode in played]
        return EvaluationBatch(outputs=[None] * len(batch), scores=scores, trajectories=played if capture_traces else None)

    def make_reflective_dataset(self, candidate: Any, eval_batch: Any, components_to_update: list[str]) -> dict[str, Any]:
        """The episodes as the reflecting model reads them, each with the text to improve."""
        played = [_for_reflection(episode) for episode in eval_batch.trajectories]
        return {name: [{"Instructions": f"the {name}", **each} for each in played] for name in components_to_update}

    def reflect(self, prompt: Any) -> str:
        """The reflecting model's answer. A prompt is paid once."""
        if self.stopped is not None:
            raise self.stopped  # gepa asks again what failed
        key = f"reflection/{blake2b(f'{name_of(self.reflection)}/{prompt}'.encode()).hexdigest()}"
        try:
            if (text := self.hosted.recall(key)) is None:
                text = self.reflection.invoke(prompt, APART).text  # not awaited: it may share the policy's connections
                self.hosted.remember(key, text)
            return text
        except Exception as error:
            self.stopped = error
            raise

    def on_error(self, event: Any) -> None:
        self.stopped = self.stopped or event["exception"]


def _for_reflection(episode: Trajectory) -> dict[str, Any]:
    """An episode with its verdict and who answered each call."""
    steps = [f"{s.action}\n-> {s.next_observation} (answered by {s.decided_by or 'nobody'})" for s in episode.steps]
    verdicts = [f"decided by {s.judged_by}: {s.reasoning}" for s in episode.steps[-1:] if s.judged_by]
    feedback = f"the episode broke off: {episode.error}" if episode.error else f"reward {episode.reward:g} of 1"
    task = episode.task.instruction or episode.task.observation
    return {"Inputs": task, "Generated Outputs": "\n\n".join(steps), "Feedback": ", ".join([feedback, *verdicts])}
