"""A training run of scripted parts, small enough to be killed at every moment."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.sqlite import SqliteSaver

from dreamgym_lg.curriculum.curriculum import Curriculum
from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.graphs.training import Training, create_training_graph
from dreamgym_lg.integrations.text_games.game import Score
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Task, Trajectory

TASKS = [Task(id=f"t{n}", instruction=f"leave house {n}", environment="house", observation="A closed door.") for n in range(6)]


class StubLearner:
    """As durable as a real one: an update counts from the moment that its line is in the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def updates(self) -> list[Any]:
        return [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []

    @property
    def iteration(self) -> int:
        return len(self.updates)

    def update(self, groups: Any) -> dict[str, float]:
        given = [[(t.task.id, t.iteration, t.rollout_index, t.reward) for t in group] for group in groups]
        with self._path.open("a") as file:
            file.write(json.dumps(given) + "\n")
        return self.metrics

    @property
    def metrics(self) -> dict[str, float]:
        uniform = all(len({reward for *_, reward in group}) == 1 for group in self.updates[-1])
        return {"loss": 1 / self.iteration, "skipped": float(uniform)}


class Process:
    """A training run, built from what is in the folder: everything that a killed process loses."""

    start: Any = {"run": "r", "iterations": 4}
    config: Any = {"configurable": {"thread_id": "r"}, "recursion_limit": 1000}

    def __init__(self, folder: Path, policy: Any, dream: Any, **options: Any) -> None:
        self.policy, self.nodes = policy, list[tuple[str, int]]()
        self.buffer, self.learner = ReplayBuffer(folder / "replay.db"), StubLearner(folder / "updates")
        self.model = Model(dream, version="0")
        self.dream = Dream([self.model], judges=[Score()])
        curriculum = Curriculum(TASKS, task_generator=vary, synthetic_share=0.5)
        curriculum.restore(self.buffer.tasks(origin="synthetic"), self.buffer.trajectories(run="r"))
        self.training = Training(
            policy=policy,
            learner=self.learner,
            dream=self.dream,
            create_environment=self.dream.create_environment,
            curriculum=curriculum,
            replay_buffer=self.buffer,
            **{"source": "synthetic", "num_tasks": 2, "num_generations": 3, "max_steps": 4, "concurrency": 1, **options},
        )
        self.training.evaluate, self.training.evaluate_every = lambda finished: {"eval_finished": finished}, 2
        self.training.on_node = lambda node, iteration: self.nodes.append((node, iteration))

    def run(self, folder: Path) -> dict[str, Any]:
        """Start the run, or go on with it, as `Experiment.train` does."""
        with SqliteSaver.from_conn_string(str(folder / "training.db")) as saver:
            graph = create_training_graph(self.training).compile(checkpointer=saver)
            start = None if graph.get_state(self.config).values else self.start
            return graph.invoke(start, self.config, durability="sync")

    def record(self) -> list[tuple[Any, ...]]:
        """All that was played, in order of its keys."""
        found = sorted(self.buffer.trajectories(run="r"), key=lambda t: (t.iteration, t.task.id, t.rollout_index))
        return [(t.iteration, t.task, t.rollout_index, t.steps, t.policy_version, t.experience_version) for t in found]

    def metrics(self) -> list[dict[str, Any]]:
        rows = self.buffer.metrics("r")
        return [{name: value for name, value in row.items() if not name.startswith("seconds_")} for row in rows]


def vary(task: Task, trajectories: Sequence[Trajectory], rng: random.Random) -> Task:
    return replace(task, id=f"{task.id}~{rng.randrange(10**6)}", origin="synthetic", parent_id=task.id)


@pytest.fixture(scope="session", name="process")
def _process(scripted: Any, door_world: Any) -> Callable[..., Process]:
    def act(_: Any) -> str:
        recorder = TokenRecorder.current()
        assert recorder is not None
        return random.Random(recorder.next_seed()).choice(["open door", "go north", "dance"])

    def make(folder: Path, reply: Callable[[Any], str] = act, **options: Any) -> Process:
        return Process(folder, scripted(reply=reply), scripted(reply=door_world), **options)

    return make


@pytest.fixture(scope="session", name="steady")
def _steady(process: Callable[..., Process], tmp_path_factory: pytest.TempPathFactory) -> Process:
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("steady")
    steady = process(folder)
    steady.run(folder)
    return steady
