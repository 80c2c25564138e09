"""The training graph: `curriculum -> rollout -> update_policy -> (evaluate) -> (refresh) -> curriculum ... -> END`.

Durable with any checkpointer: the state holds ids and counters, the payloads are in the replay buffer, and every node may
be repeated after a crash without doing its work twice.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import groupby
from typing import Any, Literal

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from dreamgym_lg.curriculum.curriculum import Curriculum
from dreamgym_lg.dream import Dream
from dreamgym_lg.environment import CreateEnvironment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.graphs.episode import create_episode_graph
from dreamgym_lg.hosted import Hosted, Usage
from dreamgym_lg.learner import Learner
from dreamgym_lg.metrics.health import Row, check_health, check_trainable, describe, is_collapsed, mostly_failed
from dreamgym_lg.metrics.names import reported_metrics
from dreamgym_lg.metrics.spending import add_totals, estimate_rest
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.replay.rows import FAILED
from dreamgym_lg.rollout import Agent, real_steps, rollout
from dreamgym_lg.types import Source, Trajectory

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float | int | str | None]

_UNIFORM = "all episodes of a task had the same reward (under learner='rft': no episode succeeded)"


class TrainingState(TypedDict, total=False):
    """Input: `run` and `iterations`; a resumed run needs no input at all."""

    run: str
    iterations: int
    """Where to stop; the counter below starts at 0."""
    iteration: int
    task_ids: list[str]
    uniform_iterations: int
    """How many iterations in a row, up to the last update, taught the learner nothing."""
    real_steps: int
    """In the real environment, spent by the rollouts of all iterations; those of evaluations are not among them."""
    collapsed: bool
    """True once the mean reward has fallen to a fraction of the best before."""
    gap: float
    """Dreamed minus real success at the last evaluation that played both; 0 where its interval holds 0."""


@dataclass(kw_only=True)
class Training:
    """The parts of a training run; its methods are the graph's nodes."""

    policy: BaseChatModel
    learner: Learner
    agent: Agent | None = None
    """Plays the episodes, e.g. a `SimulatedAgent`; None: the episode graph with `policy`."""
    create_environment: CreateEnvironment | None
    """Creates the environments of the rollouts: of `dream`, or real ones. None: `agent` has its own."""
    source: Source
    """Who answers there, as each trajectory says: `synthetic` for the experience model, `real` for the real environment.
    The steps of real rollouts are counted in the metric `real_steps`, those of failed episodes too."""
    dream: Dream | None = None
    """The dream that answers; None where the rollouts are real."""
    curriculum: Curriculum
    replay_buffer: ReplayBuffer
    num_tasks: int = 8
    """Groups per iteration."""
    num_generations: int = 8
    """Episodes per group."""
    max_steps: int = 10
    seed: int = 0
    concurrency: int = 64
    free_memory: Callable[[], None] = lambda: None
    """Called before each update, to give back the memory that only rollouts need."""
    weights_changed: Callable[[], None] = lambda: None
    """Called after each update, to drop what was cached of the old weights."""
    evaluate: Callable[[int], Metrics] | None = None
    """Called with the number of finished iterations every `evaluate_every` of them, and after the last."""
    evaluate_every: int = 10
    evaluated: int = 0
    """Dreamed episodes of an evaluation: for the estimate of what a hosted experience model will cost."""
    refresh: Callable[[int], Metrics] | None = None
    """Shows the experience model the policy's own real episodes; it spends real steps and says how many."""
    refresh_every: int = 15
    stop_after_uniform: int = 5
    """The run ends early after so many iterations in a row that taught the learner nothing (its metric `skipped`), as equal
    rewards within all groups teach GRPO nothing. 0: never."""
    stop_after_collapse: int = 3
    """The run ends early once the mean reward of so many iterations is below a quarter of the best before. 0: never."""
    max_gap: float | None = None
    """The run ends early after an evaluation whose metric `eval_gap`, dreamed minus real success, is above it, if the lower end
    of its interval, `eval_gap_low`, is above 0. None: never."""
    real_steps: int | None = None
    """With real rollouts, the run ends after the iteration that has spent so many steps in all. None: no limit."""
    on_node: Callable[[str, int], None] = lambda node, iteration: None
    report: Callable[[int, Mapping[str, float]], None] = lambda iteration, metrics: None
    """Told the metrics of each iteration at its end, by their stable names (`metrics.names`)."""
    say: Callable[[str], None] = logger.warning
    """Told what a user should know while the run goes on: that most episodes failed, that it ends early, and, after the first
    episodes with a hosted experience model, what the others will cost."""
    _estimated: bool = False

    def __post_init__(self) -> None:
        if self.source != "synthetic" and self.refresh is not None:
            raise ConfigurationError(f"source={self.source!r} with refresh=: no dream is played there; drop one of them")

    def sample_tasks(self, state: TrainingState) -> TrainingState:
        iteration = state.get("iteration", 0)
        tasks = self.curriculum.sample(self.num_tasks, iteration=iteration)
        self.replay_buffer.add_tasks(tasks)
        self.replay_buffer.record_metrics(state["run"], iteration, self.curriculum.pop_metrics())
        return {"iteration": iteration, "task_ids": [task.id for task in tasks]}

    def rollout(self, state: TrainingState) -> TrainingState:
        graph = self.agent or create_episode_graph(self.policy, max_steps=self.max_steps).compile()
        hosted, played = self.dream.hosted if self.dream else [], list[Trajectory]()
        before = [each.usage for each in hosted]
        playing = rollout(
            graph,
            [self.curriculum[task_id] for task_id in state["task_ids"]],
            self.create_environment,
            num_generations=self.num_generations,
            source=self.source,
            run=state["run"],
            iteration=state["iteration"],
            seed=self.seed,
            concurrency=self.concurrency,
            replay_buffer=self.replay_buffer,
            policy_version=str(state["iteration"]),
            experience_version=self.dream.version if self.dream else "",
            recursion_limit=2 * self.max_steps + 5,
            on_episode=played.append,
        )
        episodes = run_lasting(playing)
        if played:
            spent = [(each, each.usage.minus(usage)) for each, usage in zip(hosted, before, strict=True)]
            self._tell_cost(state, spent, len(played))
        # Here, not in the next node: a resumed run begins with the node that raised, which plays what failed again.
        check_trainable(episodes)
        if mostly_failed(episodes):
            causes = [episode.error for episode in episodes if episode.error]
            self.say(
                f"{len(causes)} of {len(episodes)} episodes of iteration {state['iteration']} failed, and the policy is "
                f"trained on the others alone; the first cause: {causes[0]}"
            )
        return {}

    def _tell_cost(self, state: TrainingState, spent: Sequence[tuple[Hosted, Usage]], played: int) -> None:
        """Once in a process: what the rest of the run will take of each hosted model's budget."""
        left, every = state["iterations"] - state["iteration"] - 1, self.evaluate_every
        evaluations = -(-state["iterations"] // every) - state["iteration"] // every if self.evaluate is not None else 0
        episodes = left * self.num_tasks * self.num_generations + evaluations * self.evaluated
        for hosted, usage in spent if episodes and not self._estimated else ():
            self.say(estimate_rest(hosted, usage, played=played, left=episodes))
        self._estimated = True

    def update_policy(self, state: TrainingState) -> TrainingState:
        iteration = state["iteration"]
        groups = self._groups(state["run"], iteration)
        ordered = [trajectory for group in groups for trajectory in group]
        check_trainable(ordered)
        metrics = describe(groups, max_new_tokens=getattr(self.policy, "max_new_tokens", None))
        spent = self._real_steps(state["run"], iteration) if self.source == "real" else 0
        if self.source == "real":
            metrics["real_steps"] = spent
        values = [self.curriculum.update(group) for group in groups]
        metrics["curriculum_value"] = sum(values) / len(values)
        if self.learner.iteration <= iteration:  # else the crash came after this update
            self.free_memory()
            self.learner.update(groups)
            self.weights_changed()
        metrics |= self.learner.metrics
        if self.dream is not None and (costs := [each.pop_metrics() for each in self.dream.hosted]):
            metrics |= {name: sum(each[name] for each in costs) for name in costs[0]}
            metrics |= add_totals(self._earlier(state), metrics)
        # an outage leaves groups of one episode, which are uniform but say nothing of the policy
        uniform = bool(self.learner.metrics.get("skipped")) and not mostly_failed(ordered)
        after: TrainingState = {
            "uniform_iterations": state.get("uniform_iterations", 0) + 1 if uniform else 0,
            "real_steps": state.get("real_steps", 0) + spent,
            "collapsed": self._watch(state, metrics),
        }
        metrics["uniform"] = int(uniform)
        early = (self.is_stuck(after) or after["collapsed"]) and iteration + 1 < state["iterations"]
        metrics["stopped_early"] = int(early)
        self._tell_uniform(state | after, uniform=uniform)
        if self.is_spent(after):
            steps = f"{after['real_steps']} real steps are spent (real_steps={self.real_steps})"
            self.say(f"the run ends after {iteration + 1} iterations: {steps}")
        self.replay_buffer.record_metrics(state["run"], iteration, metrics)
        return after

    def _groups(self, run: str, iteration: int) -> list[list[Trajectory]]:
        episodes = self.replay_buffer.trajectories(run=run, iteration=iteration, segments=True)
        ordered = sorted(episodes, key=lambda trajectory: (trajectory.task.id, trajectory.rollout_index))
        return [list(group) for _, group in groupby(ordered, key=lambda trajectory: trajectory.task.id)]

    def repeat_updates(self, run: str, finished: int) -> None:
        """Repeat, from the recorded episodes, those of the `finished` iterations' updates that the learner had not saved."""
        if self.learner.iteration >= finished:
            return
        self.say(f"iterations {self.learner.iteration} to {finished - 1} are trained again: their updates were not saved")
        self.free_memory()
        while self.learner.iteration < finished:
            self.learner.update(self._groups(run, self.learner.iteration))
        self.weights_changed()

    def _real_steps(self, run: str, iteration: int) -> int:
        """Steps of the real rollouts of an iteration, with those that failed and were played again."""
        stored = self.replay_buffer.trajectories(source="real", iteration=iteration)
        return real_steps(each for each in stored if each.run.partition(FAILED)[0] == run)

    def _earlier(self, state: TrainingState) -> list[Row]:
        """The metrics of the iterations before."""
        return [row for row in self.replay_buffer.metrics(state["run"]) if row["iteration"] < state["iteration"]]

    def _watch(self, state: TrainingState, metrics: dict[str, float | int | str | None]) -> bool:
        """Tell what begins to go wrong, note it among the iteration's metrics, and return whether the policy has collapsed."""
        iteration, window, earlier = state["iteration"], self.stop_after_collapse, self._earlier(state)
        before = earlier[-1] if earlier else {}
        for name, text in check_health([*earlier, metrics]):
            metrics[f"alarm_{name}"] = 1
            if not before.get(f"alarm_{name}"):
                self.say(f"iteration {iteration}: {text}")
        collapsed = window > 0 and is_collapsed([*earlier, metrics], window)
        if collapsed:
            self.say(
                f"the run ends after {iteration + 1} of {state['iterations']} iterations: the policy has collapsed, its mean "
                f"reward over {window} iterations is below a quarter of the best before. With real validation, the policy that "
                "did best there is kept. Train in a new folder with a lower learning_rate or a larger beta; "
                "stop_after_collapse=0 goes on"
            )
        return collapsed

    def _tell_uniform(self, state: TrainingState, *, uniform: bool) -> None:
        """Say that iterations teach nothing: at the first of them, and when the run ends."""
        finished, total = state["iteration"] + 1, state["iterations"]
        rows = self.replay_buffer.metrics(state["run"])
        taught_nothing = uniform + sum(row["iteration"] < state["iteration"] and row.get("uniform") == 1 for row in rows)
        if self.is_stuck(state) and finished < total:
            self.say(
                f"the run ends after {finished} of {total} iterations: in the last {state['uniform_iterations']}, {_UNIFORM}, "
                "which teaches nothing. Give harder or easier tasks, or stop_after_uniform=0 to go on"
            )
        elif finished >= total and taught_nothing:
            self.say(f"{taught_nothing} of {finished} iterations taught nothing: {_UNIFORM}")
        elif uniform and taught_nothing == 1:
            self.say(f"iteration {state['iteration']} taught nothing: {_UNIFORM}. It will be said at the end how many were so")

    def evaluate_policy(self, state: TrainingState) -> TrainingState:
        assert self.evaluate is not None
        finished = state["iteration"] + 1
        metrics = dict(self.evaluate(finished))
        gap, low = (float(metrics.get(name) or 0) for name in ("eval_gap", "eval_gap_low"))
        after: TrainingState = {"gap": gap if low > 0 else 0.0}
        if self.exceeds_max_gap(after) and finished < state["iterations"]:
            metrics["stopped_early"] = 1
            self.say(
                f"the run ends after {finished} of {state['iterations']} iterations: dreamed minus real success of the policy "
                f"is {gap:+.2f} (95 % interval from {low:+.2f}), above max_gap={self.max_gap:g}: it learns what is paid in the "
                "dream alone. The policy that did best in reality is kept. Refresh the experience model or give it more "
                "failures; more iterations, or max_gap=None, go on"
            )
        self.replay_buffer.record_metrics(state["run"], state["iteration"], metrics)
        return after

    def refresh_experience(self, state: TrainingState) -> TrainingState:
        assert self.refresh is not None
        self.replay_buffer.record_metrics(state["run"], state["iteration"], self.refresh(state["iteration"] + 1))
        return {}

    def count(self, state: TrainingState) -> TrainingState:
        iteration = state["iteration"]
        rows = self.replay_buffer.metrics(state["run"])
        row = next((row for row in rows if row["iteration"] == iteration), {})
        self.report(iteration, reported_metrics(row, self.source))
        return {"iteration": iteration + 1}

    def is_stuck(self, state: TrainingState) -> bool:
        return 0 < self.stop_after_uniform <= state.get("uniform_iterations", 0)

    def exceeds_max_gap(self, state: TrainingState) -> bool:
        return self.max_gap is not None and state.get("gap", 0) > self.max_gap

    def is_collapsed(self, state: TrainingState) -> bool:
        return self.stop_after_collapse > 0 and state.get("collapsed", False)

    def is_spent(self, state: TrainingState) -> bool:
        return self.source == "real" and self.real_steps is not None and state.get("real_steps", 0) >= self.real_steps

    def is_over(self, state: TrainingState, finished: int) -> bool:
        ended = self.is_stuck(state) or self.exceeds_max_gap(state) or self.is_spent(state) or self.is_collapsed(state)
        return ended or finished >= state["iterations"]

    def after_update(self, state: TrainingState) -> Literal["evaluate", "refresh", "count"]:
        finished = state["iteration"] + 1
        due = finished % self.evaluate_every == 0 or self.is_over(state, finished)
        return "evaluate" if self.evaluate is not None and due else self.after_evaluation(state)

    def after_evaluation(self, state: TrainingState) -> Literal["refresh", "count"]:
        finished = state["iteration"] + 1
        due = finished % self.refresh_every == 0 and not self.is_over(state, finished)
        return "refresh" if self.refresh is not None and due else "count"

    def next_iteration(self, state: TrainingState) -> str:
        if "run" not in state or "iterations" not in state:
            raise ConfigurationError("the training graph needs an input: {'run': name, 'iterations': n}")
        return END if self.is_over(state, state.get("iteration", 0)) else "curriculum"

    def can_play_again(self, run: str, iteration: int) -> bool:
        """True if episodes of this iteration failed, and none has been trained on."""
        episodes = self.replay_buffer.trajectories(run=run, iteration=iteration)
        return self.learner.iteration <= iteration and any(episode.error for episode in episodes)

    def timed(self, name: str, node: Callable[[TrainingState], TrainingState]) -> Any:
        """The node, its wall time recorded with the iteration's metrics."""

        @wraps(node)
        def run(state: TrainingState) -> TrainingState:
            self.on_node(name, state.get("iteration", 0))
            start = time.perf_counter()
            update = node(state)
            seconds = {f"seconds_{name}": time.perf_counter() - start}
            self.replay_buffer.record_metrics(state["run"], state.get("iteration", 0), seconds)
            return update

        return run


def create_training_graph(training: Training) -> StateGraph[TrainingState, None, TrainingState, TrainingState]:
    """Build the uncompiled training graph; compile it with a checkpointer and run it with `durability="sync"`."""
    builder = StateGraph(TrainingState)
    nodes = {
        "curriculum": training.sample_tasks,
        "rollout": training.rollout,
        "update_policy": training.update_policy,
        "evaluate": training.evaluate_policy,
        "refresh": training.refresh_experience,
    }
    for name, node in nodes.items():
        builder.add_node(name, training.timed(name, node))
    builder.add_node("count", training.count)
    builder.add_conditional_edges(START, training.next_iteration, [END, "curriculum"])
    builder.add_edge("curriculum", "rollout")
    builder.add_edge("rollout", "update_policy")
    builder.add_conditional_edges("update_policy", training.after_update)
    builder.add_conditional_edges("evaluate", training.after_evaluation)
    builder.add_edge("refresh", "count")
    builder.add_conditional_edges("count", training.next_iteration, [END, "curriculum"])
    return builder
