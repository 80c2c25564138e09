"""Answers about entities that no trace looked up: what traces say of others (hot-deck imputation)."""

import json
from random import Random
from typing import Any, NamedTuple

from dreamgym_lg.actions import parse_call
from dreamgym_lg.compiled.drawing import complete
from dreamgym_lg.compiled.entities import REQUEST, Record, Records
from dreamgym_lg.compiled.identifiers import Renaming
from dreamgym_lg.compiled.recordings import Trace
from dreamgym_lg.compiled.responder import Compiled, steps_of
from dreamgym_lg.compiled.runtime import values_in
from dreamgym_lg.dream.parts import Answer, Episode
from dreamgym_lg.dream.trace_index import TraceIndex
from dreamgym_lg.errors import Unanswered
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import IMPUTED, Task, Trajectory


class Imputed:
    """Gives an entity that no trace looked up the recorded state of another one.

    Without it a request whose order no trace looked up cannot be dreamed. The state is drawn among recorded entities that are
    named at the same place in similar requests, whatever was done about them. It gets this entity's id, and new ids for what
    it names; it is the same in all episodes of a task, and the compiled world changes it as it changes any other.

    It is made up, and comes before recorded answers, which may contradict it. No recorded success judges it, nor a check that
    asks the real database: give one that knows `documents` (`Verify`). Only tasks of the split `train` are answered.

    Args:
        world: Answers by its rules once the state is known.
        traces: A replay buffer, or an index of one that knows which tools write. Read once.
        seed: Another one draws other states.

    Raises `Unanswered` where the world does not know what a call does to an entity that no trace looked up.
    """

    name, version = IMPUTED, ""

    def __init__(self, world: Compiled, traces: ReplayBuffer | TraceIndex, *, seed: int = 0) -> None:
        self.world, self.seed, self.digest = world, seed, f"{world.digest} {seed}"
        self._index = TraceIndex.of(traces)
        self._records: Records | None = None
        self._states: dict[str, _State] = {}

    def respond(self, episode: Episode) -> Answer | None:
        # a held-out task measures the dream against its real state
        if episode.task.drawn or episode.task.split != "train" or (call := parse_call(episode.action)) is None:
            return None
        state = self._state(episode.task)
        if state.imputed.isdisjoint(map(str, values_in(dict(call.arguments)))):
            return None
        steps = [*state.documents, *steps_of(episode)]
        if (answer := self.world.answer(episode.task.id, steps, call.name, call.arguments)) is None:
            raise Unanswered(f"the compiled world does not know what {call.name} does to an entity that no trace looked up")
        return Answer(answer)

    def documents(self, task: Task) -> list[list[Any]]:
        """Look-ups of the task's entities before its first call: tool, arguments, answer.

        Recorded where a trace looked the entity up, else imputed.
        """
        return self._state(task).documents

    def _state(self, task: Task) -> "_State":
        if task.id not in self._states:
            records = self._records = self._records or self._read()
            base = self._record(records, task)
            ids = dict.fromkeys(records.spots(base.documents).values())
            documents, same = dict(base.documents), Renaming(zip(ids, ids, strict=True))
            complete(records, base, documents, same, Random(f"{self.seed}/{task.id}"), alike=False)
            del documents[REQUEST]
            known = [[tool, json.loads(key), records.text(tool, each)] for (tool, key), each in documents.items()]
            new = (json.loads(key) for tool, key in documents if (tool, key) not in records.looked_up)
            self._states[task.id] = _State(known, frozenset(str(id) for arguments in new for id in values_in(arguments)))
        return self._states[task.id]

    def _read(self) -> Records:
        self._index.refresh()
        return Records(self._index, list(self._index.replay_buffer.real_trajectories()), environment=None)

    def _record(self, records: Records, task: Task) -> Record:
        """The task's first recorded episode; one without a call where there is none."""
        recorded = (each for each in records.all if each.trajectory.task.id == task.id)
        return next(recorded, None) or records.record(Trajectory(task=task, steps=()), Trace(task.id, ()))


class _State(NamedTuple):
    """A task's world before its first call."""

    documents: list[list[Any]]
    imputed: frozenset[str]
    """The ids of entities that no trace looked up."""
