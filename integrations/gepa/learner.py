"""The prompt learner: GEPA (Agrawal et al. 2025, arXiv 2507.19457) searches, the dream plays and judges its candidates.

A search is a function of played episodes, which the replay buffer keeps, and of reflections, which the file of `Hosted` keeps:
stopped at any moment, the same call reads both again and goes on where it was.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage

from dreamgym_lg.errors import BudgetExceeded, ConfigurationError, MissingDependency
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment import gate
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.experiment.comparison import Comparison, Meter, Version
from dreamgym_lg.experiment.experience_models import own_policy
from dreamgym_lg.experiment.lock import only_process
from dreamgym_lg.experiment.workspace import Workspace, logger
from dreamgym_lg.hosted import Hosted, name_of
from dreamgym_lg.production.prompts import Changes, components, difference, export_prompts, with_prompts
from dreamgym_lg.rollout import check_played
from dreamgym_lg.simulate.doctor import TrialPolicy, try_out
from dreamgym_lg.types import Task, Trajectory

try:
    import gepa
    from gepa.core.adapter import EvaluationBatch
    from gepa.strategies.instruction_proposal import InstructionProposalSignature
    from gepa.utils.stop_condition import ScoreThresholdStopper
except ImportError as error:
    raise MissingDependency.extra("gepa", "gepa") from error

Texts = Mapping[str, str]
"""The text of each component."""


@dataclass(frozen=True, kw_only=True)
class ImprovedPrompts:
    """The texts that did best on the validation tasks of the dream; `print` shows them as a diff."""

    changes: Changes = field(repr=False)
    """Texts that differ from the original; empty where nothing did better."""
    policy: BaseChatModel = field(repr=False)
    """The chat model with the original prompts."""
    scores: tuple[float, float]
    """Mean reward on the validation tasks in the dream, before and after. The search chose by it: no proof."""
    work: Workspace = field(repr=False)

    @property
    def model(self) -> BaseChatModel:
        """The same chat model with the new texts, a policy like any other: `with_policy(graph, improved.model)`."""
        return with_prompts(self.policy, self.changes)

    def __str__(self) -> str:
        return difference(self.changes) or "no text did better than the original"

    def compare(self, *, real: bool = False) -> Comparison:
        """Play the held-out tasks (split `test`) with the original and the new texts, in the dream or on the agent's own tools.

        Episodes that were played before are read, and are none of the calls and tokens. Raises `ConfigurationError` without
        such a task and, `real`, without `verify_real=`; `EpisodesMissing` for episodes that could not be played.
        """
        if not (tasks := self.work.tasks("test")):
            raise ConfigurationError("no task has the split 'test', and a gain is shown on tasks that the search never saw")
        before = self._play("original", self.policy, tasks, real)
        return Comparison(before=before, after=self._play("improved", self.model, tasks, real) if self.changes else before)

    def export(self, folder: str | Path) -> None:
        """Write the new texts, their diff and a manifest to a new folder (`export_prompts`)."""
        export_prompts(self.changes, folder, {"model": name_of(self.policy), "learner": "gepa", "scores": self.scores})

    def _play(self, name: str, policy: BaseChatModel, tasks: Sequence[Task], real: bool) -> Version:
        meter, key = Meter(), _key(self.policy, {} if name == "original" else {n: new for n, (_, new) in self.changes.items()})
        dream = None if real else self.work.dream()
        run = f"prompts/{key}/{'real' if real else 'dream'}"
        return Version.of(name, check_played(self.work.play(run, meter.attached(policy), tasks, dream=dream)), meter)


def improve_prompts(
    work: Workspace,
    *,
    reflection: BaseChatModel | str,
    policy: BaseChatModel | str | None = None,
    episodes: int = 300,
    hosted: Hosted | None = None,
    texts: Texts | None = None,
    force: bool = False,
) -> ImprovedPrompts:
    """Search for better prompts of an agent in its dream. `DreamGym.improve_prompts` says what the arguments are."""
    world = work.world
    if not isinstance(world, AgentWorld):
        raise ConfigurationError(f"{type(world).__name__} is no agent with prompts of its own: give a DreamGym")
    acting, judge = own_policy(policy, world.graph), own_policy(reflection, None)
    budget, work.force = hosted or Hosted(), force
    work.out.mkdir(parents=True, exist_ok=True)
    with only_process(work.out):
        work.open()
        budget.keep_in(work.out / "prompts.db")
        gate.check_truthful(work)
        originals = texts or _components(world)
        adapter = PromptAdapter(work, Meter(budget).attached(acting), originals, judge, budget, episodes)
        only, validation = work.settings.references_only, work.validation_tasks()
        train, validation = gate.trainable_tasks(work), [t for t in validation if not only or adapter.dream.decides_by_traces(t)]
        if not train or episodes < len(validation or train):
            raise ConfigurationError(
                f"{len(train)} training tasks, {len(validation)} validation tasks and episodes={episodes}: every validation "
                "task is played with the original prompts alone; import traces with their outcome, or give more episodes="
            )
        work.say(_plan(work, originals, len(train), len(validation), episodes, budget))
        best, scores = adapter.search(train, validation or train, work.settings.seed)
    changes = {name: (text, best[name]) for name, text in originals.items() if best[name] != text}
    work.say(
        f"{len(changes)} of {len(originals)} texts changed; mean reward on the tasks that chose them {scores[0]:.3f} before, "
        f"{scores[1]:.3f} after: compare() shows a gain on held-out ones"
    )
    return ImprovedPrompts(changes=changes, policy=acting, scores=scores, work=work)


def _components(world: AgentWorld) -> Texts:
    """The agent's texts, as one tried episode shows them. Of two nodes with the same system message, the first."""
    _, prompts = run_lasting(try_out(world.agent(TrialPolicy(), real=False)))
    texts = components(prompts, world.examine().tools)
    if not texts:
        raise ConfigurationError("the agent has no system message and no tool, so there is no text to improve: give texts=")
    return {name: text for name, text in texts.items() if text and next(n for n, t in texts.items() if t == text) == name}


def _plan(work: Workspace, originals: Texts, train: int, validation: int, episodes: int, hosted: Hosted) -> str:
    """The line before a search: its budget, and what recorded episodes say that it will take."""
    plan = f"learner gepa: at most {episodes} dreamed episodes on {train} training and {validation} validation tasks"
    if recorded := [each for each in work.offline()[:100] if each.steps]:
        base, calls = sum(map(len, originals.values())), mean(len(each.steps) for each in recorded)
        spoken = [[len(s.observation) + len(s.action) for s in each.steps] for each in recorded]
        read = mean(sum(base + characters for characters in accumulate(each)) for each in spoken) / 4
        written = mean(len(s.action) for each in recorded for s in each.steps) * calls / 4
        cost = (read * hosted.prices[0] + written * hosted.prices[1]) / 1e6 * episodes
        plan += f"; as recorded episodes are, about {calls * episodes:,.0f} calls and {(read + written) * episodes:,.0f} tokens"
        plan += f" of the agent's model, cost {cost:,.2f}" * bool(cost)
    limits = ", ".join(f"{name} {limit:g}" for name, limit in hosted.limits.items() if limit is not None)
    return f"{plan}. Limits of agent and reflection together: {limits or 'none'}; spent so far: {hosted.usage.limited}"


def _key(policy: BaseChatModel, texts: Texts) -> str:
    """Names episodes of this chat model with these texts."""
    return blake2b(json.dumps([name_of(policy), sorted(texts.items())]).encode(), digest_size=8).hexdigest()


class PromptAdapter:
    """A `gepa.GEPAAdapter`: plays candidates in the dream, and shows its episodes to the reflecting model.

    It is `gepa`'s callback, logger and stop condition too. `stopped` is the error that ended the search.
    """

    propose_new_texts = None

    def __init__(
        self,
        work: Workspace,
        policy: BaseChatModel,
        originals: Texts,
        reflection: BaseChatModel,
        hosted: Hosted,
        episodes: int,
    ) -> None:
        self.work, self.policy, self.originals = work, policy, originals
        self.reflection, self.hosted, self.episodes = reflection, hosted, episodes
        self.dream, self.played, self.matched = work.dream(), 0, set[str]()
        self.stopped: Exception | None = None

    def search(self, train: list[Task], validation: list[Task], seed: int) -> tuple[Texts, tuple[float, float]]:
        """The best texts, and the mean validation rewards of the originals and of them. Raises the error that ended it."""
        tool = "The text is a tool's description, which an agent's model reads before it calls the tool. Write a new one.\n\n"
        template = InstructionProposalSignature.default_prompt_template
        result: Any = gepa.optimize(
            seed_candidate=dict(self.originals),
            trainset=train,
            valset=validation,
            adapter=cast(Any, self),
            reflection_lm=self.reflect,
            reflection_prompt_template={n: (tool if n.startswith("desc") else "") + template for n in self.originals},
            use_merge=True,
            stop_callbacks=[lambda state: self.stopped is not None, ScoreThresholdStopper(1.0)],
            callbacks=[cast(Any, self)],
            logger=self,
            track_best_outputs=False,
            seed=seed,
            raise_on_exception=False,  # a spent budget keeps the best so far; any other error is raised below
        )
        if isinstance(self.stopped, BudgetExceeded):
            self.work.say(f"the search ends: {self.stopped}")
        elif self.stopped is not None:
            raise self.stopped
        if unseen := sorted(self.originals.keys() - self.matched):
            self.work.say(
                f"no call of the agent's model held {', '.join(unseen)} word for word, so that no new text replaces it: a text "
                "that is written anew in each run has a part that stays; name that one by texts={...}"
            )
        return result.candidates[result.best_idx], (result.val_aggregate_scores[0], max(result.val_aggregate_scores))

    # --- what gepa asks ----------------------------------------------------------------------------------------------------

    def evaluate(self, batch: list[Task], candidate: dict[str, str], capture_traces: bool = False) -> EvaluationBatch:
        """One dreamed episode per task; its reward is the score, 0 where it could not be played.

        Raises `BudgetExceeded` for more than `episodes` in all, and `EpisodesMissing` if none of the batch could be played.
        """
        if self.played + len(batch) > self.episodes:
            raise BudgetExceeded(f"{self.played} of episodes={self.episodes} are spent, and {len(batch)} more were next")
        changes = {name: (text, candidate[name]) for name, text in self.originals.items()}
        changed = {name: new for name, (text, new) in changes.items() if new != text}
        policy = with_prompts(self.policy, changes, on_match=self.matched.add)
        played = self.work.play(f"prompts/{_key(self.policy, changed)}", policy, batch, dream=self.dream)
        if all(episode.error for episode in played):
            check_played(played)
        self.played += len(batch)
        self.work.progress("improve prompts", self.played, self.episodes)
        scores = [0.0 if episode.error else episode.reward for episode in played]
        outputs = [episode.steps[-1].action if episode.steps else "" for episode in played]
        return EvaluationBatch(outputs=outputs, scores=scores, trajectories=played if capture_traces else None)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: EvaluationBatch, components_to_update: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """The episodes as the reflecting model reads them, the same for each component."""
        return dict.fromkeys(components_to_update, [_shown(episode) for episode in eval_batch.trajectories or ()])

    def reflect(self, prompt: Any) -> str:
        """The reflecting model's answer. A prompt is paid once."""
        if self.stopped is not None:
            raise self.stopped  # gepa asks again what failed
        key = f"reflection/{blake2b(f'{name_of(self.reflection)}/{prompt}'.encode()).hexdigest()}"
        try:
            if (text := self.hosted.recall(key)) is None:
                text = self.hosted.ask(self.reflection, [HumanMessage(prompt)]).text
                self.hosted.remember(key, text)
            return text
        except Exception as error:
            self.stopped = error
            raise

    def on_error(self, event: Any) -> None:
        self.stopped = self.stopped or event["exception"]

    def log(self, message: str) -> None:
        logger.info("gepa: %s", message)


def _shown(episode: Trajectory) -> dict[str, Any]:
    """An episode with its verdict and who answered each call."""
    steps = [f"{s.action}\n-> {s.next_observation} (answered by {s.decided_by or 'nobody'})" for s in episode.steps[:-1]]
    last = episode.steps[-1] if episode.steps else None
    verdict = f"reward {episode.reward:g} of 1"
    if last is not None and last.judged_by:
        verdict += f", decided by {last.judged_by}: {last.reasoning or 'it gives no reason'}"
    return {
        "Inputs": episode.task.instruction or episode.task.observation,
        "Generated Outputs": "\n\n".join([*steps, last.action if last else ""]),
        "Feedback": f"the episode broke off: {episode.error}" if episode.error else verdict,
    }
