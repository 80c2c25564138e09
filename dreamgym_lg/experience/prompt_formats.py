"""How an experience model is asked: the two forms of its prompt, and what of it is data.

What an agent or a tool wrote is never more than a value in it. In the lines an action keeps to its own line; in the JSON
every text is encoded, so that nothing in it can close the string it stands in, or pass for a mark of a chat template.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal, Protocol, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableSequence

from dreamgym_lg.actions import ToolCall, parse_action
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.experience.hosted import Chat
from dreamgym_lg.experience.predictions import (
    INSTRUCTIONS,
    JSON_PROMPT,
    LINES_PROMPT,
    SCHEMA,
    in_hindsight,
    load_prompt,
    parse_json_prediction,
    parse_prediction,
    render_prediction,
)
from dreamgym_lg.types import Prediction, Step, Task

RUBRIC = (
    "it is a success only if the calls made so far really did everything that the task asks for, with the right arguments, "
    "and the answer says nothing that they do not show."
)
"""How a final answer is judged where the task brings no `metadata["rubric"]` of its own."""


class Form(Protocol):
    """One way to ask an experience model and to read its answers."""

    name: str
    """The prompt's name and version, as it is recorded with the answers."""

    def head(self, task: Task) -> str:
        """The system message: all that stays the same over an episode."""

    def ask(
        self, first: str | None, found: Sequence[Step], score: float, last: str, action: str, next_in_line: str = ""
    ) -> str:
        """One action to be answered. Args: `first`, the observation the episode begins with, None in later steps; `found`,
        demonstrations; `score`, the rewards so far; `last`, the newest observation; `next_in_line`, the world's hidden part."""

    def answer(self, prediction: Prediction) -> str:
        """An answer as the model writes it."""

    def read(self, text: str) -> Prediction:
        """Raises `PredictionFailed` saying what is wrong with the text."""


class Lines:
    """The short form, of models that are trained on it. Such a model may need no instructions at all (`""`)."""

    def __init__(self, instructions: str | None = None, demonstration_characters: int = 1000) -> None:
        self.instructions = INSTRUCTIONS if instructions is None else instructions
        self.characters = demonstration_characters
        self.name = _named(self.instructions, INSTRUCTIONS, LINES_PROMPT)
        self.answer, self.read = render_prediction, parse_prediction

    def head(self, task: Task) -> str:
        parts = [self.instructions, task.instruction, *self._tools(task)]
        return "\n".join(part for part in parts if part)

    def ask(
        self, first: str | None, found: Sequence[Step], score: float, last: str, action: str, next_in_line: str = ""
    ) -> str:
        """Demonstrations, the action, and what a small model does not see by itself.

        That is the score so far (it tells which progress is the last one), whether the last observation named the action's
        words, and which hidden word is next in line.
        """
        shown = [f"seen: {step.observation}\n{_on_a_line(step.action)}\n{render_prediction(right)}"
                 for step, right in cut(found, self.characters)]  # fmt: skip
        found_words = [word.lower() in words(last) for word in action.split()]
        share = "all" if all(found_words) else "some" if any(found_words) else "none"
        head = f"now, with a score of {round(score, 2):g}:"
        coming = [f"next in line: {next_in_line}"] if next_in_line else []
        text = "\n".join([*shown, head, _on_a_line(action), f"words just named: {share}", *coming])
        return text if first is None else f"{first}\n{text}"

    def _tools(self, task: Task) -> list[str]:
        """What a tool agent's world needs besides: what can be called, and how its final answer is judged."""
        if not (tools := schemas(task)):
            return []
        rubric = task.metadata.get("rubric") or RUBRIC
        return [
            'The agent acts by calling tools: {"name": ..., "arguments": ...}. Answer as the tool itself would. The tools:',
            *(json.dumps(tool, ensure_ascii=False, sort_keys=True) for tool in tools),
            '{"answer": ...} ends the episode: the status is then success or failure, the observation (nothing), and '
            f"{rubric}",
        ]


class Json:
    """The form of models that are prompted: everything but the system prompt's own text is a value in a JSON object."""

    def __init__(self, instructions: str | None = None, demonstration_characters: int = 1000) -> None:
        known = load_prompt(JSON_PROMPT)
        self.instructions = known if instructions is None else instructions
        self.characters = demonstration_characters
        self.name = _named(self.instructions, known, JSON_PROMPT)
        self.read = parse_json_prediction

    def head(self, task: Task) -> str:
        world: dict[str, Any] = {"task": task.instruction, "world_seed": world_seed(task)}
        if tools := schemas(task):
            world["tools"] = tools
            world["actions"] = 'The agent calls tools by {"name": ..., "arguments": ...}; answer as the tool itself would. '\
                               '{"answer": ...} ends the episode.'  # fmt: skip
            world["success"] = task.metadata.get("rubric") or RUBRIC
        elif rubric := task.metadata.get("rubric"):
            world["success"] = rubric
        return f"{self.instructions}\n\n{encoded(world)}"

    def ask(
        self, first: str | None, found: Sequence[Step], score: float, last: str, action: str, next_in_line: str = ""
    ) -> str:
        """`next_in_line` is not shown: a model that is prompted draws the hidden part by `world_seed` itself."""
        seen = [{"observation": step.observation, "action": step.action, "answer": _ordered(right)}
                for step, right in cut(found, self.characters)]  # fmt: skip
        start = {} if first is None else {"observation": first}
        return encoded({**({"seen": seen} if seen else {}), "score": round(score, 2), **start, "action": action})

    def answer(self, prediction: Prediction) -> str:
        return encoded(_ordered(prediction))


FormName = Literal["json_schema", "json", "lines"]

FORMS: Mapping[FormName, Callable[[str | None, int], Form]] = {"json_schema": Json, "json": Json, "lines": Lines}


def bind_schema(model: BaseChatModel, schema: Mapping[str, Any]) -> Chat:
    """The model with a JSON schema bound to it, by its own structured output.

    Without LangChain's parser behind it: ours are stricter, say what is wrong, and leave the token counts in reach.
    """
    structured = model.with_structured_output(dict(schema), method="json_schema")
    return cast(Chat, structured.first) if isinstance(structured, RunnableSequence) else model


def suited(model: BaseChatModel | None) -> FormName:
    """The form for a model of which nothing else is said: one that is reached with a key is prompted, a local one may be
    trained on the lines."""
    if model is None or not (model.profile or model.lc_secrets):
        return "lines"
    return "json_schema" if (model.profile or {}).get("structured_output") else "json"


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


@lru_cache(2000)
def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[\w'-]+", text.lower()))


def world_seed(task: Task) -> int:
    """What decides all that a task leaves open: its `metadata["seed"]`, else a number that its id stands for."""
    seed = task.metadata.get("seed")
    return seed if isinstance(seed, int) else int.from_bytes(blake2b(task.id.encode(), digest_size=4).digest())


def first_observation(task: Task) -> str:
    """Where a dream of this task begins: `metadata["observation"]`, else the instruction; "" if there is neither."""
    return str(task.metadata.get("observation") or task.instruction)


def schemas(task: Task) -> list[Any]:
    """The functions that the agent can call; of traces, which do not hold the schemas, the names."""
    tools: Sequence[str | Mapping[str, Any]] = task.metadata.get("tools") or ()
    return [{"name": tool} if isinstance(tool, str) else tool["function"] for tool in tools]


def cut(found: Sequence[Step], characters: int) -> list[tuple[Step, Prediction]]:
    """Demonstrations with what followed them, long texts cut: the end of what was before, the beginning of what came."""
    shown = []
    for step in found:
        right = in_hindsight(step, success=step.terminated and step.reward > 0)
        short = right._replace(observation=right.observation[:characters], reasoning=right.reasoning[: max(characters, 80)])
        shown.append((replace(step, observation=step.observation[-characters:]), short))
    return shown


def check_structure(prediction: Prediction, action: str, found: Sequence[Step]) -> None:
    """Raise `PredictionFailed` if a tool answers in another structure than its recorded answers have.

    If every demonstration of the same tool is a JSON object (or a list), so must the answer be. Errors may be plain text.
    """
    called = _called(action)
    if called is None or not prediction.valid:
        return
    recorded = [_container(step.next_observation) for step in found if step.valid and _called(step.action) == called]
    if recorded and recorded[0] is not None and len(set(recorded)) == 1 and _container(prediction.observation) != recorded[0]:
        raise PredictionFailed(
            f"the observation {prediction.observation[:120]!r} is no JSON {recorded[0]}, which every recorded answer of the "
            f"tool {called!r} is"
        )


def _called(action: str) -> str | None:
    try:
        parsed = parse_action(action)
    except ValueError:
        return None
    return parsed.name if isinstance(parsed, ToolCall) else None


def _container(text: str) -> str | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return "object" if isinstance(found, dict) else "list" if isinstance(found, list) else None


def _on_a_line(action: str) -> str:
    """The action on one line, so that nothing in it can pass for a part of the prompt."""
    return f"> {' '.join(action.split())}"


def _named(instructions: str, known: str, name: str) -> str:
    """The version of a prompt: its file's name, or what tells one text of the user's from another."""
    if instructions == known:
        return name
    return f"own-{blake2b(instructions.encode(), digest_size=4).hexdigest()}" if instructions else "none"
