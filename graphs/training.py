"""The training graph: `curriculum -> rollout -> update_policy -> (evaluate) -> (refresh) -> curriculum ... -> END`.

Durable with any checkpointer: the state holds ids and counters, the payloads are in the replay buffer, and every node may
be repeated after a crash without doing its work twice.
"""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from langchain_core.language_models import BaseChatModel
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.errors import GraphDrained
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import RunControl
from typing_extensions import TypedDict

from dreamgym_lg.curriculum.curriculum import Curriculum
from dreamgym_lg.environment import CreateEnvironment
from dreamgym_lg.errors import ConfigurationError, NothingToTrain
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.graphs.episode import create_episode_graph
from dreamgym_lg.learner import Learner
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.types import Trajectory

Metrics = Mapping[str, float | int | str | None]


class TrainingState(TypedDict, total=False):
    """Input: `run` and `iterations`; a resumed run needs no input at all."""

    run: str
    iterations: int
    """Where to stop; the counter below starts at 0."""
    iteration: int
    task_ids: list[str]


@dataclass(kw_only=True)
class Training:
    """The parts of a training run; its methods are the graph's nodes."""

    policy: BaseChatModel
    learner: Learner
    agent: Any = None
    """What plays the episodes, e.g. a `SimulatedAgent`; None: the episode graph with `policy`."""
    experience: ExperienceModel
    create_environment: CreateEnvironment
    """Creates the environments of the rollouts, by default dreams."""
    curriculum: Curriculum
    replay_buffer: ReplayBuffer
    num_tasks: int = 8
    """Groups per iteration."""
    num_generations: int = 8
    """Episodes per group."""
    max_steps: int = 10
    seed: int = 0
    concurrency: int = 64
    weights_changed: Callable[[], None] = lambda: None
    """Called after each update, to drop what was cached of the old weights."""
    evaluate: Callable[[int], Metrics] | None = None
    """Called with the number of finished iterations every `evaluate_every` of them, and after the last."""
    evaluate_every: int = 10
    refresh: Callable[[int], Metrics] | None = None
    """Shows the experience model the policy's own real episodes; it spends real steps and says how many."""
    refresh_every: int = 15
    on_node: Callable[[str, int], None] = lambda node, iteration: None

    def sample_tasks(self, state: TrainingState) -> TrainingState:
        iteration = state.get("iteration", 0)
        tasks = self.curriculum.sample(self.num_tasks, iteration=iteration)
        self.replay_buffer.add_tasks(tasks)
        return {"iteration": iteration, "task_ids": [task.id for task in tasks]}

    def rollout(self, state: TrainingState) -> TrainingState:
        graph = self.agent or create_episode_graph(self.policy, max_steps=self.max_steps).compile()
        episodes = rollout(
            graph,
            [self.curriculum[task_id] for task_id in state["task_ids"]],
            self.create_environment,
            num_generations=self.num_generations,
            source="synthetic",
            run=state["run"],
            iteration=state["iteration"],
            seed=self.seed,
            concurrency=self.concurrency,
            replay_buffer=self.replay_buffer,
            policy_version=str(state["iteration"]),
            experience_version=self.experience.version,
            recursion_limit=2 * self.max_steps + 5,
        )
        run_lasting(episodes)
        return {}

    def update_policy(self, state: TrainingState) -> TrainingState:
        iteration = state["iteration"]
        found = self.replay_buffer.trajectories(run=state["run"], iteration=iteration, segments=True)
        ordered = sorted(found, key=lambda trajectory: (trajectory.task.id, trajectory.rollout_index))
        groups = [list(group) for _, group in groupby(ordered, key=lambda trajectory: trajectory.task.id)]
        metrics = describe(groups)
        if all(trajectory.error or not any(step.valid for step in trajectory.steps) for trajectory in ordered):
            raise NothingToTrain(no_valid_action(ordered))
        values = [
            self.curriculum.update(group[0].task.id, [t.reward for t in group if t.error is None]) for group in groups
        ]
        metrics["curriculum_value"] = sum(values) / len(values)
        if self.learner.iteration <= iteration:  # else the crash came after this update
            self.learner.update(groups)
            self.weights_changed()
        metrics |= self.learner.metrics
        if self.experience.hosted is not None:
            metrics |= self.experience.hosted.pop_metrics()
        self.replay_buffer.record_metrics(state["run"], iteration, metrics)
        return {}

    def evaluate_policy(self, state: TrainingState) -> TrainingState:
        assert self.evaluate is not None
        self.replay_buffer.record_metrics(state["run"], state["iteration"], self.evaluate(state["iteration"] + 1))
        return {}

    def refresh_experience(self, state: TrainingState) -> TrainingState:
        assert self.refresh is not None
        self.replay_buffer.record_metrics(state["run"], state["iteration"], self.refresh(state["iteration"] + 1))
        return {}

    def count(self, state: TrainingState) -> TrainingState:
        return {"iteration": state["iteration"] + 1}

    def _due(self, state: TrainingState, every: int, *, last: bool) -> bool:
        finished = state["iteration"] + 1
        return finished % every == 0 or (last and finished == state["iterations"])

    def after_update(self, state: TrainingState) -> Literal["evaluate", "refresh", "count"]:
        if self.evaluate is not None and self._due(state, self.evaluate_every, last=True):
            return "evaluate"
        return self.after_evaluation(state)

    def after_evaluation(self, state: TrainingState) -> Literal["refresh", "count"]:
        due = self._due(state, self.refresh_every, last=False) and state["iteration"] + 1 < state["iterations"]
        return "refresh" if self.refresh is not None and due else "count"

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
    builder.add_conditional_edges(START, _next, [END, "curriculum"])
    builder.add_edge("curriculum", "rollout")
    builder.add_edge("rollout", "update_policy")
    builder.add_conditional_edges("update_policy", training.after_update)
    builder.add_conditional_edges("evaluate", training.after_evaluation)
    builder.add_edge("refresh", "count")
    builder.add_conditional_edges("count", _next, [END, "curriculum"])
    return builder


def _next(state: TrainingState) -> str:
    if "run" not in state or "iterations" not in state:
        raise ConfigurationError("the training graph needs an input: {'run': name, 'iterations': n}")
    return END if state.get("iteration", 0) >= state["iterations"] else "curriculum"


def run_training(training: Training, checkpoints: Path, *, run: str, iterations: int) -> None:
    """Run a training, or go on with the one in the SQLite file `checkpoints`, whatever ended it.

    Ctrl-C lets the node at work finish and raises KeyboardInterrupt then; a second Ctrl-C stops at once. Either way the same
    call goes on from there.
    """
    with SqliteSaver.from_conn_string(str(checkpoints)) as saver:
        graph = create_training_graph(training).compile(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": run}, "recursion_limit": 1_000_000}
        given: Any = None if graph.get_state(config).next else {"run": run, "iterations": iterations}
        control = RunControl()
        with _draining(control), _less_to_search():
            try:
                graph.invoke(given, config, durability="sync", control=control)
            except GraphDrained as drained:
                raise KeyboardInterrupt from drained


@contextmanager
def _draining(control: RunControl) -> Iterator[None]:
    """Ctrl-C asks the run to end between two nodes; signals reach the main thread only."""
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


@contextmanager
def _less_to_search() -> Iterator[None]:
    """What exists by now, some hundred thousand objects of torch and transformers, is left out of garbage collection: to
    search it again and again takes 8 % of the rollouts of a small model."""
    if gc.get_freeze_count():  # somebody else's, who may want to keep it
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def describe(groups: Sequence[Sequence[Trajectory]]) -> dict[str, float | int | str | None]:
    """What an iteration's episodes were like. Failed rollouts are counted, and left out of every mean."""
    episodes = [trajectory for group in groups for trajectory in group]
    played = [trajectory for trajectory in episodes if trajectory.error is None]
    steps = sum(len(trajectory.steps) for trajectory in played)
    synthetic = [group for group in groups if group[0].task.origin == "synthetic"]
    return {
        "episodes": len(episodes),
        "failed_episodes": len(episodes) - len(played),
        "first_error": next((t.error for t in episodes if t.error), None),
        "reward_mean": sum(trajectory.reward for trajectory in played) / max(len(played), 1),
        "dream_success": sum(trajectory.success for trajectory in played) / max(len(played), 1),
        "uniform_groups": sum(len({t.reward for t in g if t.error is None}) < 2 for g in groups) / max(len(groups), 1),
        "synthetic_share": len(synthetic) / max(len(groups), 1),
        "invalid_action_share": sum(trajectory.invalid_actions for trajectory in played) / max(steps, 1),
        "steps_mean": steps / max(len(played), 1),
        "segments": sum(len(trajectory.segments) for trajectory in episodes),
        "episodes_without_tokens": sum(not any(segment.trainable for segment in t.segments) for t in played),
    }


def no_valid_action(episodes: Sequence[Trajectory]) -> str:
    """What to tell the user when not one action of an iteration was understood."""
    errors = sorted({trajectory.error for trajectory in episodes if trajectory.error})
    if all(trajectory.error for trajectory in episodes):
        return f"all {len(episodes)} episodes failed; causes: {'; '.join(errors[:3])}"
    actions = [step.action for trajectory in episodes for step in trajectory.steps][:3]
    return (
        f"not one action of {len(episodes)} episodes was valid (the first: {actions!r}), so no reward can be earned. "
        "Fine-tune the policy on a few demonstrations first, and check that its prompt says which actions exist"
    )
