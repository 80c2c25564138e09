"""Prompt formats of the experience model: lines for trained models, JSON for prompted ones.

Texts of agents and tools are on a line of their own, or encoded, so that they cannot close a string or end a turn.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from hashlib import blake2b
from importlib.resources import files
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast, get_args

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableSequence
from pydantic import BaseModel, StrictBool, StrictFloat, StrictStr, StringConstraints, ValidationError

from dreamgym_lg.actions import tool_line
from dreamgym_lg.errors import ConfigurationError, PredictionFailed
from dreamgym_lg.hosted import Chat
from dreamgym_lg.tasks import described, is_tool_task, schemas, world_seed
from dreamgym_lg.text import clean, split_thought
from dreamgym_lg.types import Step, Task

Form = TypeVar("Form", bound=BaseModel)
WrittenText = Annotated[str, StringConstraints(strict=True, strip_whitespace=True, min_length=1)]
"""A text of a form that may not be empty."""

LINE_PROMPT, JSON_PROMPT = "experience-lines-2", "experience-json-2"
"""The system prompts of the two formats."""

NOTHING = "(nothing)"
"""Stands for an empty observation in the lines format; tools do return them."""


class Prediction(NamedTuple):
    """The experience model's answer to one action. `(s_{t+1}, r_{t+1})` with its reasoning trace `R_t` (paper, section 4)."""

    reasoning: str
    observation: str
    reward: float
    terminated: bool
    success: bool
    valid: bool


class Question(NamedTuple):
    """One step of an episode, whose outcome the model has to predict."""

    action: str
    observation: str
    """The first observation of the episode at its first step, else ""."""
    score: float
    """Sum of the episode's rewards so far."""
    demonstrations: Sequence[Step]
    """Recorded transitions like this one."""


_LINES = re.compile(
    r"(?P<reasoning>(?P<valid>valid|invalid)\b[^\n]*)\n"
    r"reward (?P<reward>[+-]?\d{1,9}(?:\.\d+)?), (?P<status>continues|success|failure)\n"
    r"(?P<observation>\S.*)",
    re.DOTALL,
)


class LineFormat:
    """The short format, for models that are trained on it.

    Args:
        instructions: The system prompt, "" for none; None for the newest of `dreamgym_lg/prompts`.
        demonstration_characters: Maximum characters of each text of a demonstration.
    """

    schema: Mapping[str, Any] | None = None

    def __init__(self, instructions: str | None = None, demonstration_characters: int = 1000) -> None:
        self.instructions = load_prompt(LINE_PROMPT) if instructions is None else instructions
        self.characters = demonstration_characters
        self.name = prompt_name(LINE_PROMPT, instructions)

    def head(self, task: Task) -> str:
        # tools before the task: the prefix that all tasks share is computed only once, in training and in the dream
        return "\n".join(part for part in (self.instructions, *tool_lines(task), described(task)) if part)

    def ask(self, task: Task, question: Question) -> str:
        """Demonstrations, the score so far and the action."""
        examples = [
            f"seen: {step.observation}\n{on_one_line(step.action)}\n{self.answer(prediction)}"
            for step, prediction in shortened(question.demonstrations, self.characters)
        ]
        head = "now:" if is_tool_task(task) else f"now, with a score of {round(question.score, 2):g}:"
        first = [question.observation] if question.observation else []
        return "\n".join([*first, *examples, head, on_one_line(question.action)])

    def answer(self, prediction: Prediction) -> str:
        """Verdict and reasoning on one line, reward (to six digits) and status, observation."""
        verdict = "valid" if prediction.valid else "invalid"
        first = prediction.reasoning
        if "\n" in first or not re.match(rf"{verdict}\b", first):
            first = ", ".join(part for part in (verdict, " ".join(first.split())) if part)
        status = "success" if prediction.success else "failure" if prediction.terminated else "continues"
        reward = f"{Decimal(f'{prediction.reward:g}'):f}"  # `g` alone writes 1e-05
        return f"{first}\nreward {reward}, {status}\n{prediction.observation.strip() or NOTHING}"

    def read(self, text: str) -> Prediction:
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


class _Answer(BaseModel, extra="forbid", title="prediction"):
    """The outcome of the agent's action."""

    # The order counts: the verdict follows from the reasoning, the observation from the verdict.
    reasoning: StrictStr
    valid: StrictBool
    reward: StrictFloat
    terminated: StrictBool
    success: StrictBool
    observation: StrictStr


class JsonFormat:
    """The format of prompted models: JSON objects after the system prompt.

    Args: as for `LineFormat`; `structured`, True to use the model's own structured output.
    """

    def __init__(
        self, instructions: str | None = None, demonstration_characters: int = 1000, *, structured: bool = False
    ) -> None:
        self.instructions = load_prompt(JSON_PROMPT) if instructions is None else instructions
        self.characters = demonstration_characters
        self.name = prompt_name(JSON_PROMPT, instructions)
        self.schema = _Answer.model_json_schema() if structured else None

    def head(self, task: Task) -> str:
        world: dict[str, Any] = {"task": described(task), "world_seed": world_seed(task)}
        if is_tool_task(task):
            world["tools"] = schemas(task)
            world["actions"] = 'The agent calls tools by {"name": ..., "arguments": ...}; answer as the tool itself would.'
        elif task.rubric:
            world["success"] = task.rubric
        return f"{self.instructions}\n\n{encoded(world)}"

    def ask(self, task: Task, question: Question) -> str:
        """One JSON object; later observations are not repeated: they are in the conversation."""
        examples = [
            {"observation": step.observation, "action": step.action, "answer": _ordered(prediction)}
            for step, prediction in shortened(question.demonstrations, self.characters)
        ]
        content: dict[str, Any] = {"seen": examples} if examples else {}
        content["score"] = round(question.score, 2)
        if question.observation:
            content["observation"] = question.observation
        return encoded({**content, "action": question.action})

    def answer(self, prediction: Prediction) -> str:
        return encoded(_ordered(prediction))

    def read(self, text: str) -> Prediction:
        """The prediction in an answer, which must have exactly these keys and types. Raises `PredictionFailed`."""
        fields = read_form(text, _Answer).model_dump()
        if not abs(reward := float(fields["reward"])) < 1e9:
            raise PredictionFailed(f"'reward' in the answer is {reward:g}; expected a finite number")
        return Prediction(**fields | {"reward": reward})


def _ordered(prediction: Prediction) -> dict[str, Any]:
    return {key: getattr(prediction, key) for key in _Answer.model_fields}


PromptFormat = LineFormat | JsonFormat

# --- choosing a format ----------------------------------------------------------------------------------------------------

PromptFormatName = Literal["json_schema", "json", "lines"]


def default_format(model: BaseChatModel | None) -> PromptFormatName:
    """A JSON format for a model that needs a key, else `lines`."""
    if model is None or not (model.profile or model.lc_secrets):
        return "lines"
    return "json_schema" if (model.profile or {}).get("structured_output") else "json"


def create_format(
    name: PromptFormatName | None, model: BaseChatModel | None, instructions: str | None, demonstration_characters: int
) -> PromptFormat:
    """The named prompt format, or the one that suits the model. Raises `ConfigurationError` for an unknown name."""
    name = name or ("lines" if instructions is not None else default_format(model))
    if name not in get_args(PromptFormatName):
        raise ConfigurationError.unknown("prompt_format", name, get_args(PromptFormatName))
    if name == "lines":
        return LineFormat(instructions, demonstration_characters)
    return JsonFormat(instructions, demonstration_characters, structured=name == "json_schema")


def bind_schema(model: BaseChatModel, schema: Mapping[str, Any]) -> Chat:
    """The model with a JSON schema bound, but without LangChain's parser."""
    structured = model.with_structured_output(dict(schema), method="json_schema")
    return cast(Chat, structured.first) if isinstance(structured, RunnableSequence) else model


def bind_form(model: BaseChatModel, form: type[BaseModel]) -> Chat:
    """The model with a form's schema bound, if it has structured output of its own."""
    return bind_schema(model, form.model_json_schema()) if default_format(model) == "json_schema" else model


# --- texts ----------------------------------------------------------------------------------------------------------------


def load_prompt(name: str) -> str:
    """The text of `dreamgym_lg/prompts/<name>.md`. A file is never edited once released: a change is the next number."""
    return files("dreamgym_lg").joinpath("prompts", f"{name}.md").read_text(encoding="utf-8").strip()


def json_prompt(name: str, content: Any) -> list[BaseMessage]:
    """The named system prompt, and its input as JSON."""
    return [SystemMessage(load_prompt(name)), HumanMessage(encoded(content))]


def prompt_name(name: str, instructions: str | None) -> str:
    """The name of a prompt. For the user's own `instructions` a digest, `none` if they are empty."""
    if instructions is None:
        return name
    return f"own-{blake2b(instructions.encode(), digest_size=4).hexdigest()}" if instructions else "none"


def tool_lines(task: Task) -> list[str]:
    """A headline and one line per tool; empty for a text agent."""
    if not is_tool_task(task):
        return []
    headline = 'The agent acts by calling tools: {"name": ..., "arguments": ...}. Answer as the tool itself would. The tools:'
    return [headline, *map(tool_line, schemas(task))]


def on_one_line(action: str) -> str:
    """The action on one line, after the mark `>` of data."""
    return f"> {' '.join(action.split())}"


def shortened(steps: Sequence[Step], characters: int) -> list[tuple[Step, Prediction]]:
    """Demonstrations with their outcomes, long texts cut."""
    pairs = []
    for step in steps:
        full = in_hindsight(step, success=step.terminated and step.reward > 0)
        short = full._replace(observation=full.observation[:characters], reasoning=full.reasoning[: max(characters, 80)])
        pairs.append((replace(step, observation=step.observation[-characters:]), short))
    return pairs


def encoded(value: Any) -> str:
    """JSON on one line; marks of chat templates (`<|im_end|>`, `[INST]`) and line breaks are escaped.

    Otherwise an observation could end its own message at a server that looks for such marks in the whole prompt.
    """
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = re.sub(r"[<\x7f\x85\u2028\u2029]|\[(?=/?[A-Z_]+\])", lambda mark: f"\\u{ord(mark[0]):04x}", text)
    return str(clean(text))


def json_object(text: str) -> dict[str, Any]:
    """The JSON object in a text, without a code fence or thinking around it. Raises `PredictionFailed`."""
    bare = split_thought(text)[1].strip()
    fenced = re.fullmatch(r"```(?:json)?\s*\n(.*)\n\s*```", bare, flags=re.DOTALL)
    try:
        value = json.loads(fenced[1] if fenced else bare)
    except (ValueError, RecursionError) as error:
        raise PredictionFailed(f"the answer {text[:200]!r} is not JSON ({error}); expected one JSON object") from None
    if not isinstance(value, dict):
        raise PredictionFailed(f"the answer {text[:200]!r} is JSON, but no object; expected one JSON object")
    return dict(clean(value))


def read_form(text: str, form: type[Form]) -> Form:
    """The JSON object in an answer as an instance of `form`. Raises `PredictionFailed` with the reason."""
    try:
        return form.model_validate(json_object(text))
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, each['loc']))!r} in the answer: {each['msg']}" for each in error.errors())
        keys = ", ".join(form.model_fields)
        raise PredictionFailed(f"{'; '.join(wrong)[:500]}; expected an object with the keys {keys}") from None


def in_hindsight(step: Step, *, success: bool) -> Prediction:
    """The right prediction of a recorded step (paper, section 4: reasoning is annotated in hindsight).

    Its reasoning is the step's own where `annotate` wrote one, else a line by rule. Args: `success`, of the episode.
    """
    if not step.valid:
        reasoning = step.reasoning or "invalid, it is not understood"
        return Prediction(reasoning, step.next_observation, 0.0, False, False, False)
    completed = step.terminated and success
    if completed:
        outcome = "it completes the task"
    elif step.reward > 0:
        outcome = "it brings progress"
    elif step.terminated:
        outcome = "it fails the task"
    else:
        outcome = "it undoes progress" if step.reward < 0 else "no progress yet"
    reasoning = step.reasoning or f"valid, {outcome}"
    return Prediction(reasoning, step.next_observation, step.reward, step.terminated, completed, True)
