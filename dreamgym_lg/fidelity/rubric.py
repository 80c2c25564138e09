"""The paper's four rubrics, each 0 to 2, judged by a chat model that is not the experience model."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage

from dreamgym_lg.dream.prompter import Prompter
from dreamgym_lg.errors import ConfigurationError, PredictionFailed
from dreamgym_lg.hosted.chat_model import name_of
from dreamgym_lg.statistics import Mean, mean
from dreamgym_lg.types import Trajectory

RUBRICS = ("consistency", "diversity", "informativeness", "hallucination")
PROMPT = "fidelity_judge_1.txt"
"""The judge's prompt, with its version in the name; in the package's templates."""
TOP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rubric:
    """Mean scores, 0 to 2 and higher is better on all four (hallucination: 2 is none)."""

    judge: str
    prompt: str
    episodes: int
    unreadable: int
    """Episodes whose scores could not be read within the retries: in no mean."""
    scores: dict[str, Mean | None]
    counts: dict[str, tuple[int, ...]]
    """Rubric -> episodes with score 0, 1 and 2."""


def check_other(judge: BaseChatModel, model: BaseChatModel | None) -> None:
    """Raise `ConfigurationError` if `judge` is the experience model itself: the object, its weights, or the same name.

    A provider's prefix does not make another model: `gpt-7` is `openai/gpt-7`.
    """
    names = [name_of(each).casefold().split("/")[-1] for each in (judge, model)]
    weights = [getattr(each, "model", each) for each in (judge, model)]
    named = names[0] != type(judge).__name__.casefold()  # a class alone says nothing of which model it is
    if judge is model or weights[0] is weights[1] or (named and names[0] == names[1]):
        raise ConfigurationError(
            f"the judge is the experience model itself ({name_of(judge)}): a model finds few faults in its own words; "
            "pass another judge_model"
        )


async def judge_episodes(
    judge: BaseChatModel,
    dreamed: Sequence[Trajectory],
    *,
    concurrency: int = 8,
    retries: int = 2,
    on_episode: Callable[[], None] = lambda: None,
) -> Rubric | None:
    """Score dreamed episodes; None if there are none. Args: `retries`, further tries after an answer not in the form."""
    if not dreamed:
        return None
    slots, prompter = asyncio.Semaphore(concurrency), Prompter(judge, retries=retries)

    async def one(trajectory: Trajectory) -> dict[str, int] | None:
        messages = [SystemMessage(prompt()), HumanMessage(_episode(trajectory))]
        try:
            async with slots:
                return await prompter.ask(messages, parse_scores, prompt=PROMPT)
        except PredictionFailed:
            return None
        finally:
            on_episode()

    scored = [scores for scores in await asyncio.gather(*map(one, dreamed)) if scores is not None]
    return Rubric(
        judge=name_of(judge),
        prompt=PROMPT,
        episodes=len(dreamed),
        unreadable=len(dreamed) - len(scored),
        scores={name: mean([scores[name] for scores in scored], top=TOP) for name in RUBRICS},
        counts={name: tuple(sum(s[name] == value for s in scored) for value in range(TOP + 1)) for name in RUBRICS},
    )


def prompt() -> str:
    return files("dreamgym_lg").joinpath(f"templates/{PROMPT}").read_text(encoding="utf-8")


def parse_scores(text: str) -> dict[str, int]:
    """The scores in the judge's answer. Raises `PredictionFailed` unless it is one JSON object in the form."""
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or set(fields) != {"reason", *RUBRICS} or not isinstance(fields["reason"], str):
        raise PredictionFailed(f"the judge answered {text[:200]!r}; expected one JSON object with reason, {', '.join(RUBRICS)}")
    for name in RUBRICS:
        if isinstance(fields[name], bool) or fields[name] not in range(TOP + 1) or not isinstance(fields[name], int):
            raise PredictionFailed(f"the judge gave {name} {fields[name]!r}; allowed: 0, 1 or 2")
    return {name: fields[name] for name in RUBRICS}


def _episode(trajectory: Trajectory) -> str:
    """JSON, so that nothing in an action or observation can pass for an instruction to the judge."""
    shown = {"action": "action", "valid": "valid", "reward": "reward", "ends": "terminated"}
    shown |= {"observation": "next_observation", "reasoning": "reasoning"}
    steps = [{key: getattr(step, field) for key, field in shown.items()} for step in trajectory.steps]
    first = trajectory.steps[0].observation if trajectory.steps else ""
    episode = {"task": trajectory.task.instruction, "first_observation": first, "steps": steps, "success": trajectory.success}
    return json.dumps(episode, ensure_ascii=False)
