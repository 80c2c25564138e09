"""An index of a replay buffer's real traces: answers by call, writing calls by task."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import lru_cache, partial
from threading import Lock
from typing import Any, NamedTuple

from langchain_core.tools import BaseTool
from pydantic import BaseModel

from dreamgym_lg.actions import is_answer, parse_action, parse_call
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.splits import entities, words
from dreamgym_lg.tasks import ToolUse, find_tool_uses, first_observation, reference_episode, rules, schemas
from dreamgym_lg.types import Step, Task, Trajectory

FREE_TEXT_WORDS = 4
"""Words from which on an argument that nobody said before counts as free text."""
MISSES = 4
"""Look-ups of unknown things are answered alike once this many tasks were."""


class Call(NamedTuple):
    """A tool call in comparable form: defaults filled in, arguments in order, 20.0 as 20."""

    tool: str
    arguments: tuple[tuple[str, Any], ...]
    """Names and values; a value that is a list or an object, as JSON."""


Effects = tuple[Call, ...]
"""Writing calls, without the wording of free text."""


class Votes(NamedTuple):
    """How often an answer was recorded for a call, and its first annotation."""

    number: int
    reasoning: str


class Success(NamedTuple):
    """A recorded success, as a reference for other episodes of its task."""

    task_id: str
    effects: Effects
    """In an order that does not depend on which tool was called first."""
    calls: tuple[str, ...]
    """Its writing calls as they were made."""
    message: str
    """The action that ended it."""
    facts: frozenset[str]
    """Ids and amounts that are new in that message, and numbers that a look-up gave.

    Neither the request nor an answer to a writing call gave them.
    """
    turns: int
    """Messages of the agent in it: 1 where no user replied."""


class TraceIndex:
    """The answers and successes in a replay buffer's real trajectories that did not fail.

    The tasks of one `Task.environment` share one world, such as one database. Traces of evaluation tasks answer nothing, and
    judge only their own task.

    Args:
        replay_buffer: Read at the first `refresh`, and again after real trajectories were added or held out.
        tools: The agent's tools, whose schemas say which defaults there are, and metadata which tools write.
        writes: As of `find_tool_uses`.
        pass_through: Tools that really run: a dream does not see their calls.

    `refresh` raises `ConfigurationError` for a name in `writes` that no tool has: none of `tools`, none that a trace calls, and
    none of a stored task. And for a tool of `pass_through` there.
    """

    def __init__(
        self,
        replay_buffer: ReplayBuffer,
        *,
        tools: Sequence[BaseTool] = (),
        writes: Collection[str] | None = None,
        pass_through: Collection[str] = (),
    ) -> None:
        self.uses: Mapping[str, ToolUse] = {}
        """Which tools write, and why; empty before the first `refresh`."""
        self.answers: dict[tuple[str, Call, Effects], dict[tuple[str, bool], Votes]] = {}
        """(task id, or `/` and an environment; call; writing calls before it) -> (answer, valid) -> votes."""
        self.successes: dict[tuple[str, ...], list[Success]] = {}
        """By task, by environment and instruction, and by these and the system message."""
        self.misses: dict[tuple[str, str, tuple[str, ...]], dict[tuple[str, bool], set[str]]] = {}
        """(environment, reading tool, names of arguments that nobody had named) -> (form of the answer, valid) -> task ids."""
        self.tools = list(tools)
        self.replay_buffer, self._writes = replay_buffer, writes
        self._pass_through = frozenset(pass_through)
        received = {tool.name: partial(_as_received, tool.tool_call_schema, _defaults(tool)) for tool in tools}
        self.call = lru_cache(100_000)(partial(comparable_call, received=received))
        """(action) -> the call that it is, in the form in which calls are compared; None for anything else."""
        self._free_text: frozenset[tuple[str, str]] = frozenset()
        self._lock = Lock()
        self._read: tuple[int, ...] | None = None

    @classmethod
    def of(cls, traces: "ReplayBuffer | TraceIndex") -> "TraceIndex":
        """The index that is given, or a new one of a replay buffer."""
        return traces if isinstance(traces, TraceIndex) else cls(traces)

    def refresh(self, *, only_once: bool = False) -> None:
        """Read the buffer's trajectories if they have changed. Args: `only_once`, not if they were read before."""
        if only_once and self._read is not None:
            return
        with self._lock:
            now = self.replay_buffer.revision()
            if now != self._read:
                self._build([*self.replay_buffer.real_trajectories()])
            self._read = now

    def _build(self, recorded: Sequence[Trajectory]) -> None:
        train = (step for each in recorded if each.task.split == "train" for step in each.steps if step.valid)
        known = {call.name for step in train if (call := parse_call(step.action)) is not None}
        if self._writes is not None:  # which may name a tool that no trace calls
            known |= {tool["name"] for task in self.replay_buffer.tasks() for tool in schemas(task)}
        new = copy(self)
        new.uses = find_tool_uses(self.tools, known, writes=self._writes, pass_through=self._pass_through)
        new._free_text = _find_free_text(recorded, new.writes)
        new.answers, new.successes, new.misses = {}, {}, {}
        for trajectory in recorded:
            new._add(trajectory)
        names = ("uses", "_free_text", "answers", "successes", "misses")
        self.__dict__.update({name: getattr(new, name) for name in names})  # at once, for those who read meanwhile

    def _add(self, trajectory: Trajectory) -> None:
        task, calls = trajectory.task, [(self.call(step.action), step) for step in trajectory.steps]
        effects: Effects = ()
        before = f"{task.instruction} {first_observation(task)} {trajectory.steps[0].observation if trajectory.steps else ''}"
        scopes = worlds_of(task.id, task.environment) if task.split == "train" else ()
        for call, step in calls:
            if call is None:
                continue
            for scope in scopes:
                votes = self.answers.setdefault((scope, call, effects), {})
                earlier = votes.get((step.next_observation, step.valid), Votes(0, step.reasoning))
                votes[step.next_observation, step.valid] = earlier._replace(number=earlier.number + 1)
            if scopes and (unnamed := unnamed_values(call, before)) and not self.writes(call.tool):
                forms = self.misses.setdefault((task.environment, call.tool, tuple(unnamed)), {})
                forms.setdefault((_form(step.next_observation, unnamed), step.valid), set()).add(task.id)
            before += f" {step.next_observation}"
            effects += self.effects([(call, step.valid)])
        if trajectory.success and trajectory.steps:
            success = self.success(task, trajectory.steps)
            same_words = _words_key(task.environment, task.instruction, task.split)
            for key in ((task.id,), same_words, (*same_words, rules(task))):
                self.successes.setdefault(key, []).append(success)

    def success(self, task: Task, steps: Sequence[Step]) -> Success:
        """The steps of a successful episode as a reference."""
        calling = [(step, self.writes(call.tool)) for step in steps if (call := self.call(step.action))]
        writing = [step for step, writes in calling if writes]
        effects = self.effects((self.call(step.action), step.valid) for step in steps)
        turns, last = sum(is_answer(step.action) for step in steps), steps[-1].action
        before = [rules(task), task.instruction, steps[0].observation, *(step.next_observation for step in writing)]
        # a price of 88 looks like a count, unless a look-up gave it
        looked_up = numbers(*(step.next_observation for step, writes in calling if not writes)) - numbers(*before)
        told = (facts(message_text(last)) - facts(*before)) | (numbers(message_text(last)) & looked_up)
        return Success(task.id, unordered(effects), tuple(step.action for step in writing), last, told, turns)

    def miss(self, environment: str, call: Call, before: str) -> tuple[str, bool] | None:
        """The answer to a look-up of what nobody named `before`, as most recorded ones."""
        unnamed = unnamed_values(call, before)
        forms = self.misses.get((environment, call.tool, tuple(unnamed)), {})
        (form, valid), tasks = max(forms.items(), key=lambda each: len(each[1]), default=(("", True), set[str]()))
        if len(tasks) < MISSES or 2 * len(tasks) <= sum(map(len, forms.values())):
            return None
        for name, value in unnamed.items():
            form = form.replace(_place(name), value)
        return form, valid

    def writes(self, tool: str) -> bool:
        """True if calls of the tool count as writing ones."""
        if tool in self._pass_through:
            return False
        if tool not in self.uses:  # the graph makes it as it runs, and no trace holds it
            return self._writes is None or tool in self._writes
        return self.uses[tool].writes

    def effects(self, calls: Iterable[tuple[Call | None, bool]]) -> Effects:
        """The writing calls among (call, valid), in their order, without the wording of free text."""
        return tuple(self._without_wording(each) for each, valid in calls if each and valid and self.writes(each.tool))

    def _without_wording(self, call: Call) -> Call:
        if not any(tool == call.tool for tool, _ in self._free_text):
            return call
        free = {name for name, value in call.arguments if (call.tool, name) in self._free_text and _is_text(value)}
        return Call(call.tool, tuple((name, "..." if name in free else value) for name, value in call.arguments))

    def references(self, task: Task, *, own_traces: bool = True) -> list[Success]:
        """The recorded successes of the task's id, else of its words. Of a drawn task its own reference.

        Of the same words under another system message (of another customer, say) are none, unless the task names no messages;
        nor are another task's conversations, in which the user said more than these words.

        Args: `own_traces`, False to leave out those of the task's own id.
        """
        if task.drawn:
            return [self.success(task, reference_episode(task).steps)]
        same_words = _words_key(task.environment, task.instruction, task.split)
        keys = (task.id,), (*same_words, rules(task)) if task.messages else same_words
        own, alike = (self.successes.get(key, []) for key in keys)
        others = [each for each in alike if each.task_id != task.id and each.turns < 2]
        return own or others if own_traces else others


def unnamed_values(call: Call, before: str) -> dict[str, str]:
    """The call's texts that do not occur in what was said before, by argument."""
    return {name: value for name, value in call.arguments if isinstance(value, str) and value and value not in before}


def _form(answer: str, unnamed: Mapping[str, str]) -> str:
    """The answer with places instead of the arguments' values, longest first."""
    for name, value in sorted(unnamed.items(), key=lambda each: -len(each[1])):
        answer = answer.replace(value, _place(name))
    return answer


def _place(name: str) -> str:
    return f"\0{name}\0"


def worlds_of(task_id: str, environment: str) -> tuple[str, str]:
    """The keys of a trace's answers, nearest first: its task, its world."""
    return task_id, f"/{environment}"


def _words_key(environment: str, instruction: str, split: str) -> tuple[str, ...]:
    """The key of successes by the task's words; those of evaluation tasks are apart."""
    return "train" if split == "train" else "evaluation", environment, instruction


def comparable_call(action: str, received: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]]) -> Call | None:
    """The call that an action is, in one form; None for anything else. Args: `received`, as each tool gets arguments."""
    if (call := parse_call(action)) is None:
        return None
    arguments = received[call.name](call.arguments) if call.name in received else call.arguments
    return Call(call.name, tuple((name, _comparable(arguments[name])) for name in sorted(arguments)))


def unordered(effects: Effects) -> Effects:
    """Effects in one order; one tool's calls keep theirs."""
    return tuple(sorted(effects, key=lambda call: call.tool))


def _comparable(value: Any) -> Any:
    """A value that can be hashed; 20.0 is 20, and truth values are no numbers."""
    if value is None or isinstance(value, str | int | float) and not isinstance(value, bool):
        return value
    return json.dumps(_whole(value), sort_keys=True, ensure_ascii=False)


def _whole(value: Any) -> Any:
    """JSON with whole numbers as integers."""
    if isinstance(value, Mapping):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_received(schema: Any, defaults: Mapping[str, Any], arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments as the tool gets them: validated, with nested defaults, without what it ignores.

    Those that it refuses, and those of a tool with a JSON schema, get the tool's own defaults alone.
    """
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        factories = {name for name, field in schema.model_fields.items() if field.default_factory and name not in arguments}
        with suppress(ValueError):
            return schema.model_validate(dict(arguments)).model_dump(mode="json", exclude=factories)
    return {**defaults, **arguments}


def _defaults(tool: BaseTool) -> dict[str, Any]:
    return {name: schema["default"] for name, schema in tool.args.items() if isinstance(schema, dict) and "default" in schema}


def message_text(action: str) -> str:
    """The text of a message; any other action as it is."""
    return str(parse_action(action)) if is_answer(action) else action


def facts(*texts: str) -> frozenset[str]:
    """The ids, amounts and addresses in texts: `entities` with a digit or an `@`."""
    return frozenset(each for text in texts for each in entities(text) if any(sign.isdigit() or sign == "@" for sign in each))


def numbers(*texts: str) -> frozenset[str]:
    """The words with a digit in texts, counts too."""
    return frozenset(each for text in texts for each in words(text) if any(map(str.isdigit, each)))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _find_free_text(recorded: Iterable[Trajectory], writes: Callable[[str], bool]) -> frozenset[tuple[str, str]]:
    """The (tool, argument) of writing calls that mostly hold freely worded text."""
    free, total = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for trajectory in recorded:
        task, steps = trajectory.task, trajectory.steps
        for position, step in enumerate(steps):
            if (call := parse_call(step.action)) is None or not writes(call.name):
                continue
            texts = {name: value for name, value in call.arguments.items() if _is_text(value)}
            total.update((call.name, name) for name in texts)
            long = {name: value for name, value in texts.items() if len(value.split()) >= FREE_TEXT_WORDS}
            earlier = (each.next_observation for each in steps[:position])
            seen = _words([rules(task), task.instruction, *earlier]) if long else ""
            free.update((call.name, name) for name, value in long.items() if _words([value]) not in seen)
    return frozenset(key for key, count in free.items() if 2 * count > total[key])


def _words(texts: Iterable[str]) -> str:
    return " ".join(" ".join(texts).lower().split())
