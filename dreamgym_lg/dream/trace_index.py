"""An index of a replay buffer's real traces: answers by call, writing calls by task."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from decimal import Decimal
from functools import lru_cache, partial
from itertools import product
from threading import Lock
from typing import Any, NamedTuple

from langchain_core.tools import BaseTool
from pydantic import BaseModel, SecretStr
from pydantic_core import to_jsonable_python

from dreamgym_lg.actions import is_answer, parse_call, tool_schemas
from dreamgym_lg.dream.facts import facts, message_text, new_facts, numbers
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.tasks import ToolUse, argument_schemas, find_tool_uses, first_observation, reference_episode, rules, schemas
from dreamgym_lg.types import Step, Task, Trajectory

FREE_TEXT_WORDS = 4
"""Least number of words of free text: an argument that does not occur earlier in the episode."""
MISSES = 4
"""Unknown things, and tasks, whose look-ups need the same answer for others to get it."""


class Call(NamedTuple):
    """A tool call in comparable form: defaults filled in, arguments in order, 20.0 as 20."""

    tool: str
    arguments: tuple[tuple[str, Any], ...]
    """(name, value) pairs, sorted; lists and objects as JSON."""


Effects = tuple[Call, ...]
"""Writing calls in order, with free text replaced by `...`."""


class Votes(NamedTuple):
    """Number of times that an answer was recorded for a call, and its first annotation."""

    number: int
    reasoning: str


class Success(NamedTuple):
    """A recorded success, as a reference for other episodes of its task."""

    task_id: str
    effects: Effects
    """Sorted by tool; calls of one tool in their order."""
    calls: tuple[str, ...]
    """Actions of the valid writing calls, in order."""
    message: str
    """The action that ended it."""
    facts: frozenset[str]
    """Ids and amounts in the message, and numbers in it that come from a look-up. Those in the request, in the user's replies
    or in answers to writing calls are left out."""
    texts: tuple[str, ...]
    """The free texts that `effects` replaces, in order."""
    turns: int
    """Number of the agent's messages: 1 if no user replied."""


class TraceIndex:
    """The answers and successes in a replay buffer's real trajectories, without failed ones.

    The tasks of one `Task.environment` share one world, such as one database. Traces of evaluation tasks answer no call, and
    judge only their own task.

    Args:
        replay_buffer: Read at the first `refresh`, and again after real trajectories were added or held out.
        tools: The agent's tools. Their schemas give default arguments, their metadata which tools write.
        writes: As for `find_tool_uses`.
        pass_through: Names of tools that really run; a dream does not see their calls.

    `refresh` raises `ConfigurationError` for a name in `writes` that is in `pass_through`, or that is no name of a tool: in
    `tools`, in a trace's calls or in a stored task.
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
        """Tool -> if it writes, and why; empty before the first `refresh`."""
        self.answers: dict[tuple[str, Call, Effects], dict[tuple[str, bool], Votes]] = {}
        """(task id, or `/` and an environment; call; writing calls before it) -> (answer, valid) -> votes.

        Writing calls are there as they were and, but for answers that show their free text, with it replaced."""
        self.wordings: dict[tuple[str, Call, Effects], dict[Effects, set[tuple[str, bool]]]] = {}
        """The keys with replaced free text -> writing calls as they were -> (answer, valid)."""
        self.known: dict[tuple[str, Call], dict[tuple[str, bool], set[str]]] = {}
        """(environment, reading call) -> (answer, valid) -> task ids."""
        self.successes: dict[tuple[str, ...], list[Success]] = {}
        """By task id; by environment and instruction; and by these and the system message."""
        self.failures: dict[str, list[Success]] = {}
        """By task id, what failed episodes did."""
        self.misses: dict[tuple[str, str, tuple[str, ...]], dict[tuple[str, bool], set[tuple[str, ...]]]] = {}
        """(environment, reading tool, arguments with unknown values) -> (answer with placeholders, valid) -> (task, values)."""
        self.tools = list(tools)
        self.replay_buffer, self._writes = replay_buffer, writes
        self.pass_through = frozenset(pass_through)
        received = {tool.name: _receiver(tool) for tool in tools}
        self.call = lru_cache(100_000)(partial(comparable_call, received=received))
        """action -> its call in comparable form; None if it is no call."""
        self._free_text: frozenset[tuple[str, str]] = frozenset()
        self._lock = Lock()
        self._revision: tuple[int, ...] | None = None

    @classmethod
    def of(cls, traces: "ReplayBuffer | TraceIndex") -> "TraceIndex":
        """`traces` itself if it is an index, else a new index of the replay buffer."""
        return traces if isinstance(traces, TraceIndex) else cls(traces)

    def refresh(self, *, only_once: bool = False) -> None:
        """Read the buffer's trajectories if they have changed. Args: `only_once`, True to read them at most once."""
        if only_once and self._revision is not None:
            return
        with self._lock:
            revision = self.replay_buffer.revision()
            if revision != self._revision:
                self._build([*self.replay_buffer.real_trajectories()])
            self._revision = revision

    def _build(self, recorded: Sequence[Trajectory]) -> None:
        train = (step for each in recorded if each.task.split == "train" for step in each.steps if step.valid)
        called = {call.name for step in train if (call := parse_call(step.action)) is not None}
        if self._writes is not None:  # it may name a tool that no trace calls
            called |= {tool["name"] for task in self.replay_buffer.tasks() for tool in schemas(task)}
        new = copy(self)
        new.uses = find_tool_uses(self.tools, called, writes=self._writes, pass_through=self.pass_through)
        new._free_text = _find_free_text(recorded, new.writes) - self._enumerations(recorded)
        new.answers, new.wordings, new.known, new.successes, new.failures, new.misses = {}, {}, {}, {}, {}, {}
        for trajectory in recorded:
            new._add(trajectory)
        names = ("uses", "_free_text", "answers", "wordings", "known", "successes", "failures", "misses")
        self.__dict__.update({name: getattr(new, name) for name in names})  # at once, as other threads may be reading

    def _enumerations(self, recorded: Iterable[Trajectory]) -> set[tuple[str, str]]:
        """The (tool, argument) pairs whose schemas list the allowed values."""
        own = [schema["function"] for schema in tool_schemas(self.tools)]
        functions = [*own, *(function for each in recorded for function in schemas(each.task))]
        return {(each["name"], name) for each in functions for name, of in argument_schemas(each).items() if _lists_values(of)}

    def _add(self, trajectory: Trajectory) -> None:
        task, calls = trajectory.task, [(self.call(step.action), step) for step in trajectory.steps]
        effects: Effects = ()
        exact: Effects = ()
        wordings = set[str]()
        before = " ".join([said_before(task), *(step.observation for step in trajectory.steps[:1])])
        scopes = worlds_of(task.id, task.environment) if task.split == "train" else ()
        for call, step in calls:
            if call is None:
                continue
            shows_wording = any(text in step.next_observation for text in wordings)  # another one, after other words
            answer = step.next_observation, step.valid
            for scope, done in product(scopes, {exact} if shows_wording else {exact, effects}):
                votes = self.answers.setdefault((scope, call, done), {})
                earlier = votes.get(answer, Votes(0, step.reasoning))
                votes[answer] = earlier._replace(number=earlier.number + 1)
                if exact != effects:
                    self.wordings.setdefault((scope, call, effects), {}).setdefault(exact, set()).add(answer)
            if scopes and not self.writes(call.tool):
                self.known.setdefault((task.environment, call), {}).setdefault(answer, set()).add(task.id)
            if scopes and (unnamed := unnamed_values(call, before)) and not self.writes(call.tool):
                forms = self.misses.setdefault((task.environment, call.tool, tuple(unnamed)), {})
                form = _with_placeholders(step.next_observation, unnamed)
                forms.setdefault((form, step.valid), set()).add((task.id, *unnamed.values()))
            before += f" {step.next_observation}"
            effects += self.effects([(call, step.valid)])
            exact += self.exact_effects([(call, step.valid)])
            wordings |= self._wordings(call) if step.valid else set()
        if trajectory.success and trajectory.steps:
            success = self.success(task, trajectory.steps)
            same_words = _words_key(task.environment, task.instruction, task.split)
            for key in ((task.id,), same_words, (*same_words, rules(task))):
                self.successes.setdefault(key, []).append(success)
        elif trajectory.has_outcome and trajectory.steps:
            self.failures.setdefault(task.id, []).append(self.success(task, trajectory.steps))

    def success(self, task: Task, steps: Sequence[Step]) -> Success:
        """The steps of a successful episode as a reference."""
        calls = [(step, self.writes(call.tool)) for step in steps if (call := self.call(step.action))]
        writing = [step for step, writes in calls if writes]
        effects = self.effects((self.call(step.action), step.valid) for step in steps)
        turns, last = sum(is_answer(step.action) for step in steps), steps[-1].action
        replies = [step.next_observation for step in steps if is_answer(step.action)]
        before = [rules(task), task.instruction, steps[0].observation, *replies, *(step.next_observation for step in writing)]
        # a plain number such as 88 is a fact only if a look-up returned it: otherwise it may be a count
        looked_up = numbers(*(step.next_observation for step, writes in calls if not writes)) - numbers(*before)
        message = message_text(last)
        stated = new_facts(facts(message), facts(*before) | numbers(*before)) | (numbers(message) & looked_up)
        done = tuple(step.action for step in writing if step.valid)
        return Success(task.id, unordered(effects), done, last, stated, self.free_texts(steps), turns)

    def miss(self, environment: str, call: Call, before: str, *, without: str = "") -> tuple[str, bool] | None:
        """(answer, valid) of look-ups of most unknown things; None without enough of them (`MISSES`).

        None, too, for a thing that a trace knows. Args: `without`, the id of a task whose traces do not count.
        """
        unnamed = unnamed_values(call, before)
        recorded = self.misses.get((environment, call.tool, tuple(unnamed)), {})
        forms = {form: {each[1:] for each in things if each[0] != without} for form, things in recorded.items()}
        (form, valid), values = max(forms.items(), key=lambda each: len(each[1]), default=(("", True), set()))
        tasks = {task for task, *_ in recorded.get((form, valid), ())} - {without}
        if min(len(values), len(tasks)) < MISSES or 2 * len(values) <= sum(map(len, forms.values())):
            return None
        for name, value in unnamed.items():
            form = form.replace(_placeholder(name), value)
        known = self.known.get((environment, call), {}).items()
        return None if any(each != (form, valid) and tasks - {without} for each, tasks in known) else (form, valid)

    def writes(self, tool: str) -> bool:
        """True if calls of the tool count as writing calls."""
        if tool in self.pass_through:
            return False
        if tool not in self.uses:  # created while the graph runs, and in no trace
            return self._writes is None or tool in self._writes
        return self.uses[tool].writes

    def effects(self, calls: Iterable[tuple[Call | None, bool]]) -> Effects:
        """The valid writing calls among (call, valid), in their order, with free text replaced."""
        return tuple(map(self._without_wording, self.exact_effects(calls)))

    def exact_effects(self, calls: Iterable[tuple[Call | None, bool]]) -> Effects:
        """As `effects`, with free text as it is."""
        return tuple(each for each, valid in calls if each and valid and self.writes(each.tool))

    def free_texts(self, steps: Iterable[Step]) -> tuple[str, ...]:
        """The texts in valid writing calls that `effects` replaces, in their order."""
        calls = (call for step in steps if step.valid and (call := self.call(step.action)) and self.writes(call.tool))
        return tuple(text for call in calls for text in self._free(call).values())

    def _free(self, call: Call) -> dict[str, str]:
        """The call's arguments of free text, by name."""
        return {name: value for name, value in call.arguments if (call.tool, name) in self._free_text and _is_text(value)}

    def _wordings(self, call: Call) -> set[str]:
        """The call's free text as a later answer may show it, plainly or in JSON."""
        texts = [text for text in self._free(call).values() if len(text.split()) > 1]  # a single word may be there by chance
        return {form for text in texts for form in (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])}

    def _without_wording(self, call: Call) -> Call:
        if not (free := self._free(call)):
            return call
        return Call(call.tool, tuple((name, "..." if name in free else value) for name, value in call.arguments))

    def references(self, task: Task, *, own_traces: bool = True) -> list[Success]:
        """The recorded successes of the task's id, else of its instruction. For a drawn task, its own reference.

        Successes of the same instruction do not count if their system message differs (another customer's, say) and the task
        has messages, nor if they are conversations, in which the user said more than the instruction.

        Args: `own_traces`, False to leave out successes of the task's own id.
        """
        if task.drawn:
            return [self.success(task, reference_episode(task).steps)]
        same_words = _words_key(task.environment, task.instruction, task.split)
        keys = (task.id,), (*same_words, rules(task)) if task.messages else same_words
        own, same_instruction = (self.successes.get(key, []) for key in keys)
        others = [each for each in same_instruction if each.task_id != task.id and each.turns < 2]
        return own or others if own_traces else others


def _lists_values(field: Any) -> bool:
    """True for a schema that lists its values, also in `Literal[...] | None`."""
    forms = [field, *((field.get("anyOf") or field.get("oneOf") or ()) if isinstance(field, Mapping) else ())]
    return any("enum" in each or "const" in each for each in forms if isinstance(each, Mapping))


def said_before(task: Task) -> str:
    """All that the agent reads before its first call."""
    return " ".join([rules(task), task.instruction, first_observation(task)])


def unnamed_values(call: Call, before: str) -> dict[str, str]:
    """The call's text arguments that do not occur in `before`, by name."""
    return {name: value for name, value in call.arguments if isinstance(value, str) and value and value not in before}


def _with_placeholders(answer: str, unnamed: Mapping[str, str]) -> str:
    """The answer with placeholders for the arguments' values, the longest replaced first."""
    for name, value in sorted(unnamed.items(), key=lambda each: -len(each[1])):
        answer = answer.replace(value, _placeholder(name))
    return answer


def _placeholder(name: str) -> str:
    return f"\0{name}\0"


def worlds_of(task_id: str, environment: str) -> tuple[str, str]:
    """The keys of a trace's answers: its task, then its world."""
    return task_id, f"/{environment}"


def _words_key(environment: str, instruction: str, split: str) -> tuple[str, ...]:
    """The key of successes by instruction; evaluation tasks have keys of their own."""
    return "train" if split == "train" else "evaluation", environment, instruction


def comparable_call(action: str, received: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]]) -> Call | None:
    """An action's call in comparable form; None if it is no call. Args: `received`, converters of arguments by tool."""
    if (call := parse_call(action)) is None:
        return None
    arguments = received[call.name](call.arguments) if call.name in received else call.arguments
    return Call(call.name, tuple((name, _comparable(arguments[name])) for name in sorted(arguments)))


def unordered(effects: Effects) -> Effects:
    """Effects sorted by tool; calls of one tool keep their order."""
    return tuple(sorted(effects, key=lambda call: call.tool))


def _comparable(value: Any) -> Any:
    """A hashable value in which 20.0 equals 20, and True does not equal 1."""
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


def _receiver(tool: BaseTool) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """A function: arguments -> JSON of what the tool receives. It is validated, without ignored arguments.

    A `@field_validator` of the tool's own schema does not run; validators of nested models and in `Annotated` do. Refused
    arguments, and those of a tool with a JSON schema, only get the tool's top-level defaults.
    """
    top_level = {name: field["default"] for name, field in tool.args.items() if isinstance(field, dict) and "default" in field}
    return partial(_as_received, tool.tool_call_schema, top_level)


def _as_received(schema: Any, top_level: Mapping[str, Any], arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        factories = {name for name, field in schema.model_fields.items() if field.default_factory and name not in arguments}
        with suppress(ValueError):
            return {**_plain(schema.model_validate(dict(arguments)).model_dump(exclude=factories))}
    return {**top_level, **arguments}


def _plain(value: Any) -> Any:
    """A validated value as JSON. Numbers are numbers, sets are sorted."""
    match value:
        case Mapping():
            return {str(_plain(key)): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case set() | frozenset():
            return sorted((_plain(each) for each in value), key=json.dumps)
        case Decimal() if value.is_finite():
            return int(value) if value == value.to_integral_value() else float(value)
        case SecretStr():
            return value.get_secret_value()
    return to_jsonable_python(value, fallback=str)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _find_free_text(recorded: Iterable[Trajectory], writes: Callable[[str], bool]) -> frozenset[tuple[str, str]]:
    """The (tool, argument) pairs of writing calls that mostly hold freely worded text."""
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
            seen = _normalised([rules(task), task.instruction, *earlier]) if long else ""
            free.update((call.name, name) for name, value in long.items() if _normalised([value]) not in seen)
    return frozenset(key for key, count in free.items() if 2 * count > total[key])


def _normalised(texts: Iterable[str]) -> str:
    return " ".join(" ".join(texts).lower().split())
