"""What real traces decide in a dream before any model is asked: recorded answers, the effects and the facts of successes.

All are for agents that act by calling tools; in a world of free text nothing here applies. The tasks of one `environment`
(`Task.environment`) share one world, as the traces of one production system share its database: give the tasks of another
database another environment's name.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from threading import Lock
from typing import Any, Literal, NamedTuple, Protocol, get_args

from langchain_core.tools import BaseTool

from dreamgym_lg.actions import is_answer, parse_action
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience.answer_facts import Facts
from dreamgym_lg.experience.predictions import Exchange, in_hindsight
from dreamgym_lg.experience.prompt_formats import schemas
from dreamgym_lg.experience.recorded_index import (
    NO_VOTES,
    Call,
    Effects,
    RecordedIndex,
    References,
    answers_others,
    comparable_call,
    find_free_text,
    success_keys,
    unordered,
    worlds_of,
)
from dreamgym_lg.experience.rules import call_reasoning, played
from dreamgym_lg.experience.writing_tools import ToolUse, find_tool_uses, use_by_name
from dreamgym_lg.replay.buffer import Changes, Record, ReplayBuffer
from dreamgym_lg.types import Prediction, Step, Task

Check = Literal["recorded", "effects", "answers"]
"""`recorded`: a call that a trace knows is answered as it was recorded. `effects`: a task with a recorded success needs the
same writing calls. `answers`: one whose recorded success wrote nothing needs an answer that tells the same facts. (A fourth
check, the tools' argument schemas, is LangChain's own and always there.)"""

CHECKS: tuple[Check, ...] = get_args(Check)


class Decision(NamedTuple):
    """What follows an action, known without asking a model."""

    prediction: Prediction
    decided_by: str
    """A `Check`, or what another `Grounds` calls its parts."""


class Grounds(Protocol):
    """What real traces decide in a dream before the experience model is asked: `Grounding`, or a world's own."""

    def refresh(self) -> None:
        """Read what is new in the traces; called before each episode."""

    def decide(self, task: Task, history: Sequence[Exchange], action: str, *, unseen: bool = False) -> Decision | None:
        """What follows an action, or None where the experience model has to be asked.

        Args:
            history: The steps of the episode so far.
            unseen: As for a task without traces of its own: to measure the dream on the traces of this very task.
        """


class Grounding:
    """The recorded answers, and the effects and facts of recorded successes, in a replay buffer's real trajectories.

    *Recorded answers.* A call (tool, arguments) after the same earlier writing calls is answered as it was recorded, byte for
    byte: as in traces of the same task, else as in those of the same world. Where recordings contradict each other, the answer
    of more than half of them is taken, and none if there is no such answer. An identical call of a reading tool with no
    writing call in between is answered as before, whoever answered. Traces of evaluation tasks answer nothing.

    *Reference effects.* Where a task has a recorded success (of the same id, else of the same instruction in the same world),
    a dreamed success needs the same writing calls with the same arguments, in any order but that of one tool's calls among
    each other, and no others. With several recorded successes, those of any of them. If they are the same, the episode is a
    success; if they are none at all (the task asks for an answer), the answer is judged, as follows. The experience model
    judges alone where there is no recorded success. An evaluation task is judged by its own recorded successes, which judge no
    other task. Refused calls (`valid` False) write nothing. Of free text (`FREE_TEXT_WORDS`, in most traces) only that it is
    there counts.

    *Facts of answers.* Where a task's recorded success wrote nothing, a dreamed success has to tell the same facts: all the
    values that the recorded answer repeats from what its tools had told (`answer_facts`: a status, a city, a price; in whatever
    words), and no other value of the same places, which would contradict it. The request's own words are no facts. With
    several recorded answers, those of any of them; a right guess, for which nothing was looked up, is none beside others. The
    experience model judges where a recorded answer tells no such fact ("Done."), and where the right facts are not all that it
    tells: it also has words of free text (a document), or what no tool had told.

    What no value tells is not seen: "not delivered" for "delivered", "yes" for "no", facts of the request merely confirmed,
    which of two told values belongs to which thing, a wrong value that no training trace tells. A value in other words ("on its
    way" for "shipped", "May 1st" for 2024-05-01) is a missing one.

    Args:
        replay_buffer: Its trajectories of the sources `offline` and `real` that did not fail. Read at the first `refresh`, and
            again by the next one after some were added or a task was held out.
        tools: The agent's tools that the dream plays; their metadata says which write, their schemas which defaults there are.
        writes: As of `find_tool_uses`.
        pass_through: Tools that really run: a dream does not see their calls, so none of them is a reference's effect.
        checks: Which of the three apply.

    Raises `ConfigurationError` for an unknown check; `refresh` for an unknown name in `writes`.
    """

    def __init__(
        self,
        replay_buffer: ReplayBuffer,
        *,
        tools: Sequence[BaseTool] = (),
        writes: Collection[str] | None = None,
        pass_through: Collection[str] = (),
        checks: Collection[Check] = CHECKS,
    ) -> None:
        check_known(checks)
        self.checks = frozenset(checks)
        self.uses: Mapping[str, ToolUse] = {}
        """Which tools write, and why; empty before the first `refresh`."""
        self._replay_buffer, self._tools, self._told = replay_buffer, list(tools), writes
        self._pass_through = frozenset(pass_through)
        self._call = lru_cache(100_000)(partial(comparable_call, defaults={tool.name: _defaults(tool) for tool in tools}))
        self._lock = Lock()
        self._read: Changes | None = None
        self._index = RecordedIndex(self.writes, frozenset())

    def refresh(self) -> None:
        """Read the buffer's trajectories, if others are in it than when they were last read."""
        with self._lock:
            now = self._replay_buffer.changes(self._read.newest if self._read is not None else 0)
            if self._read is None or now.real or now.held_out != self._read.held_out:
                self._build(self._replay_buffer.records())
            self._read = now

    def _build(self, records: Sequence[Record]) -> None:
        calls = [
            [(action, answer) for action, answer, valid, _ in each.steps if valid] for each in records if answers_others(each)
        ]
        self.uses = find_tool_uses(self._tools, calls, writes=self._told)
        index = RecordedIndex(self.writes, find_free_text(records, self.writes))
        for record in records:
            index.add(record, [self._call(action) for action, *_ in record.steps])
        if "answers" in self.checks:
            index.read_answers(records, self._pass_through)
        self._index = index

    def writes(self, tool: str) -> bool:
        """Whether calls of the tool count as writing ones."""
        if tool in self._pass_through:
            return False
        if tool not in self.uses:  # the graph makes it as it runs, and no trace holds it
            return use_by_name(tool).writes if self._told is None else tool in self._told
        return self.uses[tool].writes

    def comparable(self, action: str) -> Call | None:
        """The call that an action is, in the form in which calls are compared; None for anything else."""
        return self._call(action)

    def effects(self, steps: Iterable[tuple[str, bool]]) -> Effects:
        """The writing calls among (action, valid), in their order, without the wording of free text."""
        return self._index.effects((self._call(action), valid) for action, valid in steps)

    def judges(self, task: Task) -> bool:
        """Whether recorded successes decide every outcome of the task, so that the experience model never judges it."""
        if "effects" not in self.checks or not (references := self._references(task)):
            return False
        recorded = references.get(())
        return recorded is None or bool(recorded) and all(facts and facts.complete for facts in recorded)

    def decide(self, task: Task, history: Sequence[Exchange], action: str, *, unseen: bool = False) -> Decision | None:
        """As `Grounds.decide`."""
        calls = [(self._call(each.action), each.prediction.valid) for each in history]
        effects = self._index.effects(calls)
        if (call := self._call(action)) is not None:
            if "recorded" not in self.checks:
                return None
            found = self._before(call, calls, history) or self._recorded(task, history, action, call, effects, unseen)
            return Decision(found, "recorded") if found is not None else None
        return None if unseen or not is_answer(action) else self._judge(task, unordered(effects), action)

    def _before(self, call: Call, calls: Sequence[tuple[Call | None, bool]], history: Sequence[Exchange]) -> Prediction | None:
        """What an identical reading call was answered in this episode, since its last writing call."""
        if self.writes(call.tool):
            return None
        for (earlier, valid), exchange in zip(reversed(calls), reversed(history), strict=True):
            if earlier == call:
                return exchange.prediction
            if earlier is not None and self.writes(earlier.tool) and valid:
                return None
        return None

    def _recorded(
        self,
        task: Task,
        history: Sequence[Exchange],
        action: str,
        call: Call,
        effects: Effects,
        unseen: bool,
    ) -> Prediction | None:
        own, world = (self._index.answers.get((scope, call, effects), {}) for scope in worlds_of(task.id, task.environment))
        if unseen:
            others = {answer: votes.number - own.get(answer, NO_VOTES).number for answer, votes in world.items()}
            own, world = {}, {answer: votes._replace(number=others[answer]) for answer, votes in world.items()}
        for answers in (own, world):
            (answer, valid), votes = max(answers.items(), key=lambda each: each[1].number, default=(("", True), NO_VOTES))
            if 2 * votes.number > sum(each.number for each in answers.values()):
                return self._answered(task, history, action, answer, valid=valid, reasoning=votes.reasoning)
        return None

    def _answered(
        self, task: Task, history: Sequence[Exchange], action: str, answer: str, *, valid: bool = True, reasoning: str = ""
    ) -> Prediction:
        """This answer, with the reasoning that the experience model is trained to give where it has none."""
        step = Step(observation="", action=action, next_observation=answer, valid=valid)
        writes = frozenset(filter(self.writes, self.uses))
        reasoning = reasoning or call_reasoning(task, [played(each) for each in history], step, writes)
        return in_hindsight(replace(step, reasoning=reasoning), success=False)

    def _judge(self, task: Task, done: Effects, action: str) -> Decision | None:
        """The verdict on a final answer behind these writing calls."""
        references = self._references(task)
        if references and not done and done in references:
            return self._judge_answer(references[done], action) if "answers" in self.checks else None
        if not references or "effects" not in self.checks:
            return None
        success = done in references
        reasoning = "valid, it completes the task: the writing calls are those of a recorded success"
        if not success:
            wanted = " or ".join(sorted(map(_told, references)))
            reasoning = f"valid, it fails the task: a recorded success made {wanted}; this episode made {_told(done)}"
        return _verdict(success, reasoning, "effects")

    def _judge_answer(self, recorded: Sequence[Facts | None], action: str) -> Decision | None:
        agreeing = [facts for facts in recorded if facts and self._index.vocabulary.agrees(str(parse_action(action)), facts)]
        if any(facts.complete for facts in agreeing):
            return _verdict(True, "valid, it completes the task: the answer tells the facts of a recorded one", "answers")
        if agreeing or None in recorded:
            return None
        wanted = " or ".join(sorted({str(facts) for facts in recorded}))
        reasoning = f"valid, it fails the task: a recorded answer tells {wanted}; this one does not, or contradicts it"
        return _verdict(False, reasoning, "answers")

    def _references(self, task: Task) -> References:
        """The recorded successes of the task, as far as the agent has the tools for them."""
        tools = {tool["name"] for tool in schemas(task)}
        for scope in success_keys(task.id, task.environment, task.instruction, task.split):
            found = self._index.successes.get(scope, {})
            if reachable := {made: found[made] for made in found if not tools or tools.issuperset(each.tool for each in made)}:
                return reachable
        return {}


def check_known(checks: Collection[Check]) -> None:
    """Raise `ConfigurationError` for a name that is no check's."""
    if isinstance(checks, str):
        raise ConfigurationError(f"checks={checks!r}: give a list of names, of {', '.join(CHECKS)}")
    for name in checks:
        if name not in CHECKS:
            raise ConfigurationError.unknown("check", name, CHECKS)


def _verdict(success: bool, reasoning: str, decided_by: Check) -> Decision:
    return Decision(Prediction(reasoning, "", float(success), True, success, True), decided_by)


def _defaults(tool: BaseTool) -> dict[str, Any]:
    return {name: schema["default"] for name, schema in tool.args.items() if isinstance(schema, dict) and "default" in schema}


def _told(effects: Effects) -> str:
    return ", ".join(f"{tool} {json.dumps(dict(given), ensure_ascii=False)}" for tool, given in effects) or "no writing call"
