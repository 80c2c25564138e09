"""The training graph: `curriculum -> rollout -> update_policy -> (evaluate) -> curriculum ... -> END`.

A broken policy is neither updated nor evaluated any more.

Durable with any checkpointer: the state holds ids and counters, the replay buffer holds the data, and a node that is
repeated after a crash does not do its work twice.
"""

import logging
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.errors import GraphDrained
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import RunControl
from typing_extensions import TypedDict

from dreamgym_lg.curriculum.curriculum import Curriculum
from dreamgym_lg.dream import Dream
from dreamgym_lg.dream.relative import compare_groups
from dreamgym_lg.environment import CreateEnvironment
from dreamgym_lg.errors import ConfigurationError, writing
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.graphs.episode import create_episode_graph
from dreamgym_lg.hosted import Hosted, Usage
from dreamgym_lg.learner import Groups, Learner, has_learning_signal
from dreamgym_lg.metrics import (
    Row,
    add_totals,
    check_health,
    check_trainable,
    describe,
    estimate_rest,
    find_breakage,
    mostly_failed,
    reported_metrics,
)
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.replay.rows import FAILED
from dreamgym_lg.rollout import Agent, real_steps, rollout, superstep_limit
from dreamgym_lg.types import Source, Task, Trajectory

Figures = dict[str, float | int | str | None]
SAME_REWARDS = "all episodes of a task had the same reward (rft: no new success, or it did not improve validation)"
"""A reason why a learner skips an iteration, for messages."""


def _why_nothing(unanswered: float) -> str:
    """The reason why a learner skips an iteration. Args: `unanswered`, as of `TrainingState`."""
    if not unanswered:
        return SAME_REWARDS
    others = f"; of the others, {SAME_REWARDS}" if unanswered < 1 else ""
    return f"{unanswered:.0%} of the groups made a call that nothing in the dream answers, and are left out{others}"


class TrainingState(TypedDict, total=False):
    """The state of a training run. Input: `run` and `iterations`; a resumed run needs none."""

    run: str
    iterations: int
    """Total number of iterations."""
    iteration: int
    """Number of the current iteration, from 0."""
    task_ids: list[str]
    uniform_iterations: int
    """Number of iterations in a row, up to the last update, that taught nothing."""
    unanswered: float
    """Share of the last update's groups with a call that nothing in the dream answers."""
    real_steps: int
    """Real steps of all iterations' rollouts, without those of evaluations."""
    gap: float
    """Dreamed minus real success at the last evaluation of both. 0 if its interval includes 0."""
    broken: str
    """The figure that shows that updates broke the policy (`find_breakage`). Empty for a sound one."""


@dataclass(kw_only=True)
class Training:
    """The parts of a training run; its methods are the graph's nodes."""

    policy: BaseChatModel
    learner: Learner
    agent: Agent | None = None
    """Plays the episodes, e.g. a `SimulatedAgent`. None: the episode graph with `policy`."""
    create_environment: CreateEnvironment | None
    """Creates the environments of the rollouts, of `dream` or real ones. None: `agent` has its own."""
    source: Source
    """`synthetic` if `dream` answers, `real` for the real environment, whose steps are counted."""
    dream: Dream | None = None
    curriculum: Curriculum
    replay_buffer: ReplayBuffer
    num_tasks: int = 8
    num_generations: int = 8
    resample: int = 0
    """Maximum further groups of an iteration, in place of uniform ones."""
    max_steps: int = 10
    seed: int = 0
    concurrency: int = 64
    free_memory: Callable[[], None] = lambda: None
    """Called before each update, to release memory that only rollouts need."""
    weights_changed: Callable[[], None] = lambda: None
    """Called after each update, to drop caches of the old weights."""
    evaluate: Callable[[int], Row] | None = None
    """Called every `evaluate_every` iterations and after the last, with the number of finished iterations."""
    evaluate_every: int = 10
    evaluated: int = 0
    """Number of dreamed episodes of an evaluation, to estimate the cost of hosted models."""
    stop_after_uniform: int = 5
    """Uniform iterations in a row that end the run early (metric `skipped`). 0: never."""
    max_gap: float | None = None
    """Gap (`eval_gap`) above which the run ends early, if its interval is above 0. None: never."""
    real_steps: int | None = None
    """Number of real steps after which a run with real rollouts ends. None: no limit."""
    reality: tuple[Agent, CreateEnvironment | None] | None = None
    """Agent and environments of every `real_every`-th iteration beside a dream, until `real_steps` are spent."""
    real_every: int = 4
    on_node: Callable[[str, int], None] = lambda node, iteration: None
    """Called with a node's name and the iteration, before the node runs."""
    report: Callable[[int, Mapping[str, float]], None] = lambda iteration, metrics: None
    """Called with each iteration's number and metrics at its end; their names are those of trackers (`metrics`)."""
    say: Callable[[str], None] = logging.getLogger(__name__).warning
    """Called with one-line messages for the user."""
    _estimated: bool = False

    def sample_tasks(self, state: TrainingState) -> TrainingState:
        iteration = state.get("iteration", 0)
        tasks = self.curriculum.sample(self.num_tasks, iteration=iteration, real=self._place(state) == "real")
        self.replay_buffer.add_tasks(tasks)
        self.replay_buffer.record_metrics(state["run"], iteration, self.curriculum.pop_metrics())
        return {"iteration": iteration, "task_ids": [task.id for task in tasks]}

    def _place(self, state: TrainingState) -> Source:
        """`real` or `synthetic`: the place of this iteration's rollouts."""
        due = self.reality is not None and (state.get("iteration", 0) + 1) % self.real_every == 0
        return "real" if due and state.get("real_steps", 0) < (self.real_steps or 0) else self.source

    def rollout(self, state: TrainingState) -> TrainingState:
        before = [(each, each.usage) for each in (self.dream.hosted if self.dream else ())]
        episodes, played = list[Trajectory](), list[Trajectory]()
        tasks, left = [self.curriculum[task_id] for task_id in state["task_ids"]], self.resample
        while tasks:
            episodes += run_lasting(self._play(state, tasks, played))
            groups = [episodes[i : i + self.num_generations] for i in range(0, len(episodes), self.num_generations)]
            if not mostly_failed(episodes) and (after := self._find_breakage(state, groups)):
                return after
            missing = min(len(state["task_ids"]) - sum(map(has_learning_signal, groups)), left)
            used = {each.task.id for each in episodes}
            real = self._place(state) == "real"
            tasks = self.curriculum.sample_more(max(missing, 0), iteration=state["iteration"], used=used, real=real)
            left -= len(tasks)
        if played and not self._estimated and self._place(state) != "real":
            self._estimated = True
            self._say_cost(state, [(each, each.usage.minus(usage)) for each, usage in before], len(played))
        check_trainable(episodes)  # here, so that a resumed run, which repeats the node that raised, plays again
        if mostly_failed(episodes):
            causes = [episode.error for episode in episodes if episode.error]
            failed = f"{len(causes)} of {len(episodes)} episodes of iteration {state['iteration']} failed"
            self.say(f"{failed}, and the policy is trained on the others alone; the first cause: {causes[0]}")
        return {}

    def _find_breakage(self, state: TrainingState, groups: Groups) -> TrainingState:
        """Report a broken policy and record the iteration. Returns the change of state; empty for a sound policy."""
        metrics, earlier = self._describe(state, groups), self._earlier(state)
        if not (broken := find_breakage(earlier, metrics)):
            return {}
        metrics |= self._pop_costs(earlier)
        after: TrainingState = {"broken": broken}
        self._say_end(state, after, metrics)
        self.replay_buffer.record_metrics(state["run"], state["iteration"], metrics)
        return after

    def _earlier(self, state: TrainingState) -> list[dict[str, Any]]:
        """The metrics of the iterations before this one."""
        return [row for row in self.replay_buffer.metrics(state["run"]) if row["iteration"] < state["iteration"]]

    def _pop_costs(self, earlier: Sequence[Row]) -> Figures:
        """The hosted models' metrics since the last call, and the run's totals. Empty without such a model."""
        if self.dream is None or not (each := [hosted.pop_metrics() for hosted in self.dream.hosted]):
            return {}
        costs: Figures = {name: sum(one[name] for one in each) for name in each[0]}
        return costs | add_totals(earlier, costs)

    def _describe(self, state: TrainingState, groups: Groups) -> Figures:
        metrics = describe(groups, max_new_tokens=getattr(self.policy, "max_new_tokens", None))
        if self._place(state) == "real":
            metrics["real_steps"] = self._real_steps(state["run"], state["iteration"])
        return metrics

    async def _play(self, state: TrainingState, tasks: Sequence[Task], played: list[Trajectory]) -> list[Trajectory]:
        place, default = self._place(state), (self.agent, self.create_environment)
        agent, create_environment = default if self.reality is None or place == self.source else self.reality
        episodes = await rollout(
            agent or create_episode_graph(self.policy, max_steps=self.max_steps).compile(),
            tasks,
            create_environment,
            num_generations=self.num_generations,
            source=place,
            run=state["run"],
            iteration=state["iteration"],
            seed=self.seed,
            concurrency=self.concurrency,
            replay_buffer=self.replay_buffer,
            policy_version=str(state["iteration"]),
            experience_version=self.dream.version if self.dream and place != "real" else "",
            recursion_limit=superstep_limit(self.max_steps),
            on_episode=played.append,
        )
        return await compare_groups(self.dream, episodes, self.replay_buffer)

    def _say_cost(self, state: TrainingState, spent: Sequence[tuple[Hosted, Usage]], played: int) -> None:
        """Estimate and report the cost of the rest of the run."""
        done, total, every = state["iteration"], state["iterations"], self.evaluate_every
        evaluations = -(-total // every) - done // every if self.evaluate is not None else 0
        episodes = (total - done - 1) * self.num_tasks * self.num_generations + evaluations * self.evaluated
        for hosted, usage in spent if episodes else ():
            self.say(estimate_rest(hosted, usage, played=played, left=episodes))

    def update_policy(self, state: TrainingState) -> TrainingState:
        iteration = state["iteration"]
        groups = self._groups(state["run"], iteration)
        ordered = [trajectory for group in groups for trajectory in group]
        check_trainable(ordered)
        metrics = self._describe(state, groups)
        metrics["curriculum_value"] = fmean(map(self.curriculum.update, groups))
        if self.learner.iteration <= iteration:  # else a crash came after this update
            self.free_memory()
            self.learner.update(self._select_groups(groups))
            self.weights_changed()
        metrics |= self.learner.metrics
        earlier = self._earlier(state)
        metrics |= self._pop_costs(earlier)
        # an outage leaves groups of one episode, which are uniform for no fault of the policy
        metrics["uniform"] = int(bool(self.learner.metrics.get("skipped")) and not mostly_failed(ordered))
        after: TrainingState = {
            "uniform_iterations": state.get("uniform_iterations", 0) + 1 if metrics["uniform"] else 0,
            "unanswered": float(metrics["unanswered_groups"] or 0),
            "real_steps": state.get("real_steps", 0) + int(metrics.get("real_steps") or 0),
        }
        self._say_alarms(earlier, metrics, iteration)
        self._say_end(state, after, metrics)
        self._say_uniform(state, after, sum(row.get("uniform") == 1 for row in (*earlier, metrics)))
        self.replay_buffer.record_metrics(state["run"], iteration, metrics)
        return after

    def _groups(self, run: str, iteration: int) -> list[list[Trajectory]]:
        episodes = self.replay_buffer.trajectories(run=run, iteration=iteration, segments=True)
        ordered = sorted(episodes, key=lambda each: (each.task.id, each.rollout_index))
        return [list(group) for _, group in groupby(ordered, key=lambda each: each.task.id)]

    def _select_groups(self, groups: Groups) -> Groups:
        """The groups for the learner, without uniform ones that others were sampled to replace."""
        most = max(self.num_tasks, sum(map(has_learning_signal, groups)))
        return sorted(groups, key=has_learning_signal, reverse=True)[:most] if self.resample else groups

    def repeat_updates(self, run: str, finished: int) -> None:
        """Repeat the updates that the learner had not saved before a crash, from stored episodes."""
        if self.learner.iteration >= finished:
            return
        self.say(f"iterations {self.learner.iteration} to {finished - 1} are trained again: their updates were not saved")
        self.free_memory()
        while self.learner.iteration < finished:
            self.learner.update(self._select_groups(self._groups(run, self.learner.iteration)))
        self.weights_changed()

    def _real_steps(self, run: str, iteration: int) -> int:
        """Steps of an iteration's real rollouts, failed ones included."""
        stored = self.replay_buffer.trajectories(source="real", iteration=iteration)
        return real_steps(each for each in stored if each.run.partition(FAILED)[0] == run)

    def _say_alarms(self, earlier: Sequence[Row], metrics: Figures, iteration: int) -> None:
        """Report new alarms, and add all alarms to the iteration's metrics."""
        before = earlier[-1] if earlier else {}
        for name, text in check_health([*earlier, metrics]):
            metrics[f"alarm_{name}"] = 1
            if not before.get(f"alarm_{name}"):
                self.say(f"iteration {iteration}: {text}")

    def _say_uniform(self, state: TrainingState, after: TrainingState, uniform: int) -> None:
        """Report the first iteration without a learning signal, and at the end their number."""
        finished, total, why = state["iteration"] + 1, state["iterations"], _why_nothing(after["unanswered"])
        if finished >= total and uniform:
            self.say(f"{uniform} of {finished} iterations taught nothing: {why}")
        elif uniform == after.get("uniform_iterations") == 1 and not self.end_cause(after):
            at_end = "It will be said at the end how many were so"
            self.say(f"iteration {state['iteration']} taught nothing: {why}. {at_end}")

    def _say_end(self, state: TrainingState, after: TrainingState, metrics: Figures) -> None:
        """Report why a run ends early, and add `stopped_early` and `end_cause` to the iteration's metrics."""
        finished, total = state["iteration"] + (not after.get("broken")), state["iterations"]
        cause = self.end_cause(after) if finished < total else ""
        metrics["stopped_early"] = int(bool(cause))
        if cause:
            metrics["end_cause"] = cause
            self.say(f"the run ends after {finished} of {total} iterations: {cause}")

    def evaluate_policy(self, state: TrainingState) -> TrainingState:
        assert self.evaluate is not None
        metrics = dict(self.evaluate(state["iteration"] + 1))
        gap, low = (float(metrics.get(name) or 0) for name in ("eval_gap", "eval_gap_low"))
        after: TrainingState = {"gap": gap if low > 0 else 0.0}
        if self.end_cause(after):
            self._say_end(state, after, metrics)
        self.replay_buffer.record_metrics(state["run"], state["iteration"], metrics)
        return after

    def count(self, state: TrainingState) -> TrainingState:
        iteration = state["iteration"]
        row = next((row for row in self.replay_buffer.metrics(state["run"]) if row["iteration"] == iteration), {})
        self.report(iteration, reported_metrics(row, "real" if "real_steps" in row else "synthetic"))
        return {"iteration": iteration + (not state.get("broken"))}

    def end_cause(self, state: TrainingState) -> str:
        """The reason why a run ends early; "" for none."""
        if broken := state.get("broken"):
            fix = "Train in a new folder with a lower learning_rate or a larger beta"
            return f"the policy is broken: {broken}. Kept are the weights that did best in real validation, else these. {fix}"
        if 0 < self.stop_after_uniform <= (uniform := state.get("uniform_iterations", 0)):
            unanswered = state.get("unanswered", 0.0)
            fix = "Import traces of such calls, or give an experience model" if unanswered else "Give harder or easier tasks"
            return f"the last {uniform} taught nothing: {_why_nothing(unanswered)}. {fix}, or stop_after_uniform=0 to go on"
        if self.max_gap is not None and (gap := state.get("gap", 0)) > self.max_gap:
            return (
                f"dreamed minus real success of the policy is {gap:+.2f}, above max_gap={self.max_gap:g}: it learns what is "
                "rewarded in the dream alone. The policy that did best in reality is kept. Give the experience model more "
                "failures; more iterations, or max_gap=None, go on"
            )
        spent = state.get("real_steps", 0)
        if self.source == "real" and self.real_steps is not None and spent >= self.real_steps:
            return f"{spent} real steps are spent (real_steps={self.real_steps})"
        return ""

    def is_over(self, state: TrainingState, finished: int) -> bool:
        return finished >= state["iterations"] or bool(self.end_cause(state))

    def after_rollout(self, state: TrainingState) -> Literal["update_policy", "count"]:
        return "count" if state.get("broken") else "update_policy"

    def after_update(self, state: TrainingState) -> Literal["evaluate", "count"]:
        finished = state["iteration"] + 1
        due = finished % self.evaluate_every == 0 or self.is_over(state, finished)
        return "evaluate" if self.evaluate is not None and due else "count"

    def next_iteration(self, state: TrainingState) -> str:
        if "run" not in state or "iterations" not in state:
            raise ConfigurationError("the training graph needs an input: {'run': name, 'iterations': n}")
        return END if self.is_over(state, state.get("iteration", 0)) else "curriculum"

    def can_play_again(self, run: str, iteration: int) -> bool:
        """True if episodes of this iteration failed and it has not been trained on."""
        episodes = self.replay_buffer.trajectories(run=run, iteration=iteration)
        return self.learner.iteration <= iteration and any(episode.error for episode in episodes)

    def timed(self, name: str, node: Callable[[TrainingState], TrainingState]) -> Any:
        """Wrap a node so that its wall time is recorded with the iteration's metrics."""

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
    nodes = {"curriculum": training.sample_tasks, "rollout": training.rollout}
    nodes |= {"update_policy": training.update_policy, "evaluate": training.evaluate_policy}
    for name, node in nodes.items():
        builder.add_node(name, training.timed(name, node))
    builder.add_node("count", training.count)
    builder.add_conditional_edges(START, training.next_iteration, [END, "curriculum"])
    builder.add_edge("curriculum", "rollout")
    builder.add_conditional_edges("rollout", training.after_rollout)
    builder.add_conditional_edges("update_policy", training.after_update)
    builder.add_edge("evaluate", "count")
    builder.add_conditional_edges("count", training.next_iteration, [END, "curriculum"])
    return builder


def run_training(training: Training, checkpoints: Path, *, run: str, iterations: int) -> bool:
    """Run a training, or resume the one in the SQLite file `checkpoints`. Returns False if the policy is broken.

    After Ctrl-C the current node finishes and KeyboardInterrupt is raised; a second Ctrl-C stops at once. Either way the same
    call resumes. Args: `iterations`, total number, which replaces an earlier one.
    """
    with SqliteSaver.from_conn_string(str(checkpoints)) as saver:
        graph = create_training_graph(training).compile(checkpointer=saver)
        config: RunnableConfig = {"configurable": {"thread_id": run}, "recursion_limit": 1_000_000}
        values: Any = {"run": run, "iterations": iterations}
        saved = graph.get_state(config)
        # a node that ended before its checkpoint was written is in `tasks`, but not in `next`
        node = saved.tasks[0].name if saved.tasks else None
        ended = node is not None and not saved.next
        counted = node == "count" and not ended and not saved.values.get("broken")
        updated = node == "evaluate" or counted or (node == "update_policy" and ended)
        training.repeat_updates(run, saved.values.get("iteration", 0) + updated)
        if node is not None:
            if saved.next == ("update_policy",) and training.can_play_again(run, saved.values["iteration"]):
                graph.update_state(config, values, as_node="curriculum")  # so that the next node is `rollout`
            elif saved.values["iterations"] != iterations:
                graph.update_state(config, values)
            values = None
        elif iterations > saved.values.get("iterations", iterations):
            # more iterations were requested: the causes of an early end no longer count
            values |= {"uniform_iterations": 0, "gap": 0.0}
        control = RunControl()
        with _draining(control):
            try:
                return not graph.invoke(values, config, durability="sync", control=control).get("broken")
            except sqlite3.OperationalError:  # of the checkpoints; the replay buffer raises errors of its own
                with writing(checkpoints, sqlite3.OperationalError):
                    raise
            except GraphDrained as drained:
                raise KeyboardInterrupt from drained


@contextmanager
def _draining(control: RunControl) -> Iterator[None]:
    """Let Ctrl-C end the run after the current node. In the main thread only, which gets the signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def drain(*_: Any) -> None:
        control.request_drain("Ctrl-C")
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, drain)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
