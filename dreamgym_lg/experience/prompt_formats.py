"""The prompt formats: how an experience model is asked, and how its answers are written and read.

Two say the same: `LineFormat`, short enough for a small model that is trained on it, and `JsonFormat`, for a model that is
prompted. What an agent or a tool wrote is never more than a value in a prompt: in the lines an action keeps to its own line; in
the JSON every text is encoded, so that nothing in it can close the string it stands in, or pass for a mark of a chat template.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from dreamgym_lg.actions import ToolCall, parse_action, tool_line
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.experience.hidden_facts import world_seed
from dreamgym_lg.experience.notes import Note, notes_from_json, notes_of, notes_to_json, read_notes, write_notes
from dreamgym_lg.experience.predictions import in_hindsight, json_object, load_prompt
from dreamgym_lg.types import Prediction, Step, Task

LINE_PROMPT, JSON_PROMPT = "experience-7", "experience-6"
"""The system prompts of the two formats."""
NOTES_PROMPT = "notes-1"
"""What asks for notes in JSON."""

NOTHING = "(nothing)"
"""Stands for an empty observation in the lines; tools do give them."""

RUBRIC = (
    "it is a success only if the calls made so far really did everything that the task asks for, with the right arguments, "
    "and the answer says nothing that they do not show."
)
"""How a final answer is judged where the task brings no `metadata["rubric"]` of its own."""


class Question(NamedTuple):
    """What an experience model is asked at one step of an episode: what follows `action`?"""

    action: str
    seen: Sequence[str]
    """The episode's observations so far, oldest first. The first question shows the first one; every later one is in the
    conversation."""
    score: float
    """The sum of the episode's rewards so far."""
    demonstrations: Sequence[Step]
    """Recorded transitions like this one."""
    hidden: str
    """The fact that the world reveals next (`HiddenFacts`); "" for none."""
    calls: str
    """What a tool agent has done before its final answer (`rules.calls_made`); "" before any other action."""


class PromptFormat(Protocol):
    """How an experience model is asked, and how its answers are written and read."""

    name: str
    """The prompt's name and version, as it is recorded with the answers."""
    schema: Mapping[str, Any] | None
    """The JSON schema that the model is bound to by its own structured output; None to leave the model as it is."""

    def head(self, task: Task) -> str:
        """The system message: all that stays the same over an episode, the notes of the task's world included."""

    def ask(self, task: Task, question: Question) -> str:
        """The message that asks what follows the action."""

    def answer(self, prediction: Prediction) -> str:
        """An answer as the model should write it."""

    def read(self, text: str) -> Prediction:
        """What the answer says, believable or not. Raises `PredictionFailed` saying what is wrong with the text."""

    def ask_notes(self, task: Task, recorded: Callable[[str], Sequence[str]]) -> str:
        """The message behind `head` that asks for the notes of a world. Args: `recorded`, a reading tool's recorded answers."""

    def answer_notes(self, notes: Sequence[Note]) -> str:
        """Notes as the model should write them."""

    def read_notes(self, text: str) -> list[Note]:
        """The notes that an answer holds. Raises `PredictionFailed` saying what is wrong with the text."""


_LINES = re.compile(
    r"(?P<reasoning>(?P<valid>valid|invalid)\b[^\n]*)\n"
    r"reward (?P<reward>[+-]?\d{1,9}(?:\.\d+)?), (?P<status>continues|success|failure)\n"
    r"(?P<observation>\S.*)",
    re.DOTALL,
)


class LineFormat:
    """The short format, for models that are trained on it. Such a model may need no instructions at all (`""`).

    Args:
        instructions: The system prompt; None for the newest of `dreamgym_lg/prompts`.
        demonstration_characters: How much of each text of a demonstration is shown.
    """

    schema: Mapping[str, Any] | None = None

    def __init__(self, instructions: str | None = None, demonstration_characters: int = 1000) -> None:
        self.instructions = load_prompt(LINE_PROMPT) if instructions is None else instructions
        self.characters = demonstration_characters
        self.name = LINE_PROMPT if instructions is None else _own_name(instructions)

    def head(self, task: Task) -> str:
        noted = [f"notes, what tools answer before anything is changed:\n{notes}"] if (notes := notes_of(task)) else []
        # the tools come first: what all tasks begin with is computed once, in training and in the dream
        parts = [self.instructions, *self._tools(task), task.instruction, *noted]
        return "\n".join(part for part in parts if part)

    def ask(self, task: Task, question: Question) -> str:
        """Demonstrations, the action, and what a small model does not see by itself.

        That is the score so far (it tells which progress is the last one), what of the action was named before, the hidden
        fact, and before a final answer what has been done.
        """
        shown = [
            f"seen: {step.observation}\n{_on_a_line(step.action)}\n{self.answer(right)}"
            for step, right in cut(question.demonstrations, self.characters)
        ]
        head = f"now, with a score of {round(question.score, 2):g}:"
        named = _named(task, question.action, question.seen)
        coming = [f"next in line: {question.hidden}"] if question.hidden else []
        coming += [f"calls so far: {question.calls}"] if question.calls else []
        text = "\n".join([*shown, head, _on_a_line(question.action), *named, *coming])
        return f"{question.seen[0]}\n{text}" if len(question.seen) == 1 else text

    def answer(self, prediction: Prediction) -> str:
        """Verdict and reasoning, reward (to six digits) and status, observation, as `read` takes them.

        Reasoning that does not begin with the verdict or has several lines (an annotation) is put behind it, on one.
        """
        verdict = "valid" if prediction.valid else "invalid"
        first = prediction.reasoning
        if "\n" in first or not re.match(rf"{verdict}\b", first):
            first = ", ".join(part for part in (verdict, " ".join(first.split())) if part)
        status = "success" if prediction.success else "failure" if prediction.terminated else "continues"
        reward = f"{Decimal(f'{prediction.reward:g}'):f}"  # `g` alone writes 1e-05
        return f"{first}\nreward {reward}, {status}\n{prediction.observation.strip() or NOTHING}"

    def read(self, text: str) -> Prediction:
        """Strictly. Raises `PredictionFailed` with the format and the text if it is not in it."""
        match = _LINES.fullmatch(text.strip())
        if match is None:
            raise PredictionFailed(
                f"the experience model answered {text[:200]!r}; expected 'valid|invalid, reasoning' / "
                "'reward <number>, continues|success|failure' / the observation, a line each"
            )
        observation, status = match["observation"].strip(), match["status"]
        return Prediction(
            reasoning=match["reasoning"],
            observation="" if observation == NOTHING else observation,
            reward=float(match["reward"]),
            terminated=status != "continues",
            success=status == "success",
            valid=match["valid"] == "valid",
        )

    def ask_notes(self, task: Task, recorded: Callable[[str], Sequence[str]]) -> str:
        """Without what is recorded: a model that is trained on the lines has read it."""
        return f"{first_observation(task)}\nwhat do tools answer here, before anything is changed?"

    def answer_notes(self, notes: Sequence[Note]) -> str:
        return write_notes(notes) or NOTHING

    def read_notes(self, text: str) -> list[Note]:
        return read_notes("" if text.strip() == NOTHING else text.strip())

    def _tools(self, task: Task) -> list[str]:
        """What a tool agent's world needs besides: what can be called, and how its final answer is judged."""
        if not is_tool_task(task):
            return []
        rubric = task.metadata.get("rubric") or RUBRIC
        return [
            'The agent acts by calling tools: {"name": ..., "arguments": ...}. Answer as the tool itself would. The tools:',
            *map(tool_line, schemas(task)),
            '{"answer": ...} ends the episode: the status is then success or failure, the observation (nothing), and '
            f"{rubric}",
        ]


SCHEMA: Mapping[str, Any] = {
    "title": "prediction",
    "description": "What follows the agent's action.",
    "type": "object",
    "properties": {
        "reasoning": {"type": "string"},
        "valid": {"type": "boolean"},
        "reward": {"type": "number"},
        "terminated": {"type": "boolean"},
        "success": {"type": "boolean"},
        "observation": {"type": "string"},
    },
    "required": ["reasoning", "valid", "reward", "terminated", "success", "observation"],
    "additionalProperties": False,
}
"""An answer in JSON. The order counts: the verdict follows from the reasoning, the observation from the verdict."""


class JsonFormat:
    """The format of models that are prompted: everything but the system prompt's own text is a value in a JSON object.

    Args:
        instructions: The system prompt; None for the newest of `dreamgym_lg/prompts`.
        demonstration_characters: How much of each text of a demonstration is shown.
        schema: `SCHEMA` for a model with structured output of its own.
    """

    def __init__(
        self,
        instructions: str | None = None,
        demonstration_characters: int = 1000,
        *,
        schema: Mapping[str, Any] | None = None,
    ) -> None:
        self.instructions = load_prompt(JSON_PROMPT) if instructions is None else instructions
        self.characters = demonstration_characters
        self.name = JSON_PROMPT if instructions is None else _own_name(instructions)
        self.schema = schema

    def head(self, task: Task) -> str:
        world: dict[str, Any] = {"task": task.instruction, "world_seed": world_seed(task)}
        if is_tool_task(task):
            world["tools"] = schemas(task)
            world["actions"] = (
                'The agent calls tools by {"name": ..., "arguments": ...}; answer as the tool itself would. '
                '{"answer": ...} ends the episode.'
            )
            world["success"] = task.metadata.get("rubric") or RUBRIC
        elif rubric := task.metadata.get("rubric"):
            world["success"] = rubric
        if notes := notes_of(task):
            world["notes"] = notes_to_json(read_notes(notes))
        return f"{self.instructions}\n\n{encoded(world)}"

    def ask(self, task: Task, question: Question) -> str:
        """One JSON object; what was seen later than at first and `calls` are not shown again: they are in the conversation."""
        shown = [
            {"observation": step.observation, "action": step.action, "answer": _ordered(right)}
            for step, right in cut(question.demonstrations, self.characters)
        ]
        asked: dict[str, Any] = {"seen": shown} if shown else {}
        asked["score"] = round(question.score, 2)
        if len(question.seen) == 1:
            asked["observation"] = question.seen[0]
        if question.hidden:
            asked["hidden"] = question.hidden
        return encoded({**asked, "action": question.action})

    def answer(self, prediction: Prediction) -> str:
        return encoded(_ordered(prediction))

    def read(self, text: str) -> Prediction:
        """Strictly: these keys, these types. Raises `PredictionFailed` saying what is wrong."""
        found = json_object(text)
        wanted = {key: kind["type"] for key, kind in SCHEMA["properties"].items()}
        if found.keys() != wanted.keys():
            raise PredictionFailed(f"the answer has the keys {sorted(found)}; expected {', '.join(wanted)}")
        for key, kind in wanted.items():
            if not _is(found[key], kind):
                raise PredictionFailed(f"{key!r} in the answer is {str(found[key])[:80]!r}; expected a {kind}")
        return Prediction(**{**found, "reward": float(found["reward"])})

    def ask_notes(self, task: Task, recorded: Callable[[str], Sequence[str]]) -> str:
        """With two recorded answers of each tool: what is noted has their structure."""
        names = [tool["name"] for tool in schemas(task)]
        seen = {name: [text[: self.characters] for text in found[:2]] for name in names if (found := recorded(name))}
        return f"{load_prompt(NOTES_PROMPT)}\n\n{encoded({'observation': first_observation(task), 'seen': seen})}"

    def answer_notes(self, notes: Sequence[Note]) -> str:
        return encoded({"notes": notes_to_json(notes)})

    def read_notes(self, text: str) -> list[Note]:
        return notes_from_json(json_object(text).get("notes"))


def _is(value: object, kind: str) -> bool:
    if kind == "number":  # a boolean is an int to Python
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9 and math.isfinite(value)
    return isinstance(value, str if kind == "string" else bool)


def _ordered(prediction: Prediction) -> dict[str, Any]:
    return {key: getattr(prediction, key) for key in SCHEMA["properties"]}


def encoded(value: Any) -> str:
    """JSON on one line, of which no text can be taken for anything else.

    What begins the marks of chat templates (`<|im_end|>`, `</s>`, `[INST]`) is written as an escape: a server that looks for
    them in the whole prompt would else let an observation end its own message. So are the line breaks that JSON allows.
    """
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = re.sub(r"[<\x7f\x85\u2028\u2029]|\[(?=/?[A-Z_]+\])", lambda found: f"\\u{ord(found[0]):04x}", text)
    return text.encode("utf-8", "replace").decode()  # half an emoji, from an answer that was cut


def _named(task: Task, action: str, seen: Sequence[str]) -> list[str]:
    """What of an action was named before, as at most one line.

    Of a tool call, the arguments whose values the instruction or an observation names; of a text game's action, whether the
    last observation names its words.
    """
    try:
        called = parse_action(action)
    except ValueError:
        if is_tool_task(task):
            return []
        found = [word.lower() in words(seen[-1]) for word in action.split()]
        return [f"words just named: {'all' if all(found) else 'some' if any(found) else 'none'}"]
    given = called.arguments if isinstance(called, ToolCall) else {}
    values = {name: parts for name in sorted(given) if (parts := list(_texts(given[name])))}
    texts = [task.instruction, *seen]
    named = [name for name, parts in values.items() if all(any(_names(text, part) for text in texts) for part in parts)]
    new = [name for name in values if name not in named]
    return [f"values named before: {', '.join(named) or 'none'}; new: {', '.join(new) or 'none'}"] if values else []


def _texts(value: Any) -> Iterator[str]:
    """The texts and numbers in an argument."""
    if isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)
    elif isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
        yield str(value).strip()


@lru_cache(10_000)
def _names(text: str, part: str) -> bool:
    """Whether a text holds another one, not as a piece of a longer word or number."""
    return re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text, re.IGNORECASE) is not None


@lru_cache(2000)
def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[\w'-]+", text.lower()))


def first_observation(task: Task) -> str:
    """Where a dream of this task begins: `metadata["observation"]`, else the instruction; "" if there is neither."""
    return str(task.metadata.get("observation") or task.instruction)


def is_tool_task(task: Task) -> bool:
    """Whether an agent with tools plays this task: its actions are calls, or the answer that ends it."""
    return "tools" in task.metadata


def with_tools(task: Task, shown: Sequence[Mapping[str, Any]]) -> Task:
    """The task of an agent that was shown these tools: its own schemas stay, and those it had no schema of are added.

    What a tool returns, which no trace says, is added to its own schema too.
    """
    known = [tool for tool in task.metadata.get("tools") or () if not isinstance(tool, str)]
    returns = {f["name"]: {"returns": f["returns"]} for f in (tool["function"] for tool in shown) if "returns" in f}
    known = [{**tool, "function": tool["function"] | returns.get(tool["function"]["name"], {})} for tool in known]
    names = {tool["function"]["name"] for tool in known}
    added = [tool for tool in shown if tool["function"]["name"] not in names]
    return replace(task, metadata={**task.metadata, "tools": [*known, *added]})


def schemas(task: Task) -> list[Mapping[str, Any]]:
    """The functions that the agent can call, by name; of traces that came without schemas, the names alone."""
    tools: Sequence[str | Mapping[str, Any]] = task.metadata.get("tools") or ()
    found = [{"name": tool} if isinstance(tool, str) else tool["function"] for tool in tools]
    return sorted(found, key=lambda function: str(function["name"]))


def cut(found: Sequence[Step], characters: int) -> list[tuple[Step, Prediction]]:
    """Demonstrations with what followed them, long texts cut: the end of what was before, the beginning of what came."""
    shown = []
    for step in found:
        right = in_hindsight(step, success=step.terminated and step.reward > 0)
        short = right._replace(observation=right.observation[:characters], reasoning=right.reasoning[: max(characters, 80)])
        shown.append((replace(step, observation=step.observation[-characters:]), short))
    return shown


def _on_a_line(action: str) -> str:
    """The action on one line, so that nothing in it can pass for a part of the prompt."""
    return f"> {' '.join(action.split())}"


def _own_name(instructions: str) -> str:
    """What tells one system prompt of the user's from another; `none` for an empty one."""
    return f"own-{blake2b(instructions.encode(), digest_size=4).hexdigest()}" if instructions else "none"
