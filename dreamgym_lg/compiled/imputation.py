"""Answers about entities that no trace looked up, from those of others (hot-deck imputation)."""

import json
from random import Random
from typing import Any, NamedTuple

from dreamgym_lg.actions import parse_call
from dreamgym_lg.compiled.drawing import complete
from dreamgym_lg.compiled.entities import REQUEST, Record, Records
from dreamgym_lg.compiled.identifiers import Renaming
from dreamgym_lg.compiled.recordings import Trace
from dreamgym_lg.compiled.responder import Compiled, steps_of, to_answer
from dreamgym_lg.compiled.runtime import values_in
from dreamgym_lg.dream.parts import Answer, Episode
from dreamgym_lg.dream.trace_index import TraceIndex
from dreamgym_lg.errors import Unanswered
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import IMPUTED, Task, Trajectory


class Imputed:
    """Gives an entity that no trace looked up the recorded state of another one.

    Without it a request about such an entity cannot be dreamed. The state is drawn among recorded entities at the same place in
    similar requests, whatever their agents did. It keeps this entity's id, and the entities in it get new ids. It is the same
    in all episodes of a task, and the compiled world changes it like any other.

    Put it before `Recorded`, whose answers may contradict the made-up state. For the same reason neither recorded successes
    nor a check on the real database can judge it: give a `Verify` that uses `documents`. Only tasks of the split `train` are
    answered.

    Args:
        world: Computes the answers from the imputed state.
        traces: A replay buffer, or an index of one that knows which tools write. Read once.
        seed: Selects the states.

    Raises `Unanswered` if the world does not know a call's effect on an imputed entity.
    """

    name, version = IMPUTED, ""

    def __init__(self, world: Compiled, traces: ReplayBuffer | TraceIndex, *, seed: int = 0) -> None:
        self.world, self.seed, self.digest = world, seed, f"{world.digest} {seed}"
        self._index = TraceIndex.of(traces)
        self._records: Records | None = None
        self._states: dict[str, _State] = {}

    def respond(self, episode: Episode) -> Answer | None:
        # held-out tasks measure the dream against the real state
        if episode.task.drawn or episode.task.split != "train" or (call := parse_call(episode.action)) is None:
            return None
        state = self._state(episode.task)
        if state.imputed.isdisjoint(map(str, values_in(dict(call.arguments)))):
            return None
        steps = [*state.documents, *steps_of(episode)]
        if (answer := self.world.answer(episode.task.id, steps, call.name, call.arguments)) is None:
            raise Unanswered(f"the compiled world does not know what {call.name} does to an entity that no trace looked up")
        return to_answer(answer)

    def documents(self, task: Task) -> list[list[Any]]:
        """[tool, arguments, answer] of the task's entities before its first call, recorded or else imputed."""
        return self._state(task).documents

    def _state(self, task: Task) -> "_State":
        if task.id not in self._states:
            records = self._records = self._records or self._read()
            base = self._record(records, task)
            ids = dict.fromkeys(records.spots(base.documents).values())
            documents, identity = dict(base.documents), Renaming(zip(ids, ids, strict=True))
            complete(records, base, documents, identity, Random(f"{self.seed}/{task.id}"), alike=False)
            del documents[REQUEST]
            lookups = [[tool, json.loads(key), records.text(tool, node)] for (tool, key), node in documents.items()]
            imputed = (json.loads(key) for tool, key in documents if (tool, key) not in records.looked_up)
            self._states[task.id] = _State(lookups, frozenset(str(id) for arguments in imputed for id in values_in(arguments)))
        return self._states[task.id]

    def _read(self) -> Records:
        self._index.refresh()
        return Records(self._index, list(self._index.replay_buffer.real_trajectories()), environment=None)

    def _record(self, records: Records, task: Task) -> Record:
        """The task's first recorded episode; if there is none, an empty one."""
        recorded = (each for each in records.all if each.trajectory.task.id == task.id)
        return next(recorded, None) or records.record(Trajectory(task=task, steps=()), Trace(task.id, ()))


class _State(NamedTuple):
    """A task's world before its first call."""

    documents: list[list[Any]]
    imputed: frozenset[str]
    """The ids of entities that no trace looked up."""
