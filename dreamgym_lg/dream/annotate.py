"""Reasoning traces for recorded episodes, written in hindsight by a chat model (paper, section 4).

Each trajectory is read whole, its outcome known, and answered with an overall plan, a success mode, a failure mode and one
transition plan a step: why this action leads to this observation. The plans become the steps' reasoning, on which the
experience model is trained; the rest makes the annotator think the episode through first, and is kept beside it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from dreamgym_lg.dream.prompts import bind_schema, default_format, encoded, json_object, load_prompt
from dreamgym_lg.errors import BudgetExceeded, ModelUnavailable, PredictionFailed
from dreamgym_lg.hosted.chat_model import name_of
from dreamgym_lg.hosted.hosted import Hosted, hosted_for
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Source, Split, Trajectory

PROMPT = "annotate-1"

SCHEMA: Mapping[str, Any] = {
    "title": "annotation",
    "description": "How a recorded episode went, and why each action led to what followed.",
    "type": "object",
    "properties": {
        "overall_plan": {"type": "string"},
        "success_mode": {"type": "string"},
        "failure_mode": {"type": "string"},
        "transition_plans": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"step": {"type": "integer"}, "transition_plan": {"type": "string"}},
                "required": ["step", "transition_plan"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["overall_plan", "success_mode", "failure_mode", "transition_plans"],
    "additionalProperties": False,
}


class Annotation(NamedTuple):
    """One answer of the annotator."""

    plans: list[str]
    """The transition plan of every step."""
    episode: Mapping[str, str]
    """Its `overall_plan`, `success_mode` and `failure_mode`."""


class Annotated(NamedTuple):
    """What came of `annotate`."""

    written: int
    """Trajectories whose steps have their reasoning now."""
    skipped: int
    """Trajectories that had it before."""
    failed: Mapping[str, str]
    """Trajectories without it, by task and index, each with its cause; they are tried again next time."""


class Annotate(Protocol):
    """`partial(annotate, model=...)`, with its further arguments, such as a budget (`hosted`)."""

    def __call__(self, replay_buffer: ReplayBuffer, *, source: Source | None) -> Coroutine[Any, Any, Annotated]: ...


async def annotate(
    replay_buffer: ReplayBuffer,
    model: BaseChatModel,
    *,
    hosted: Hosted | None = None,
    source: Source | None = "offline",
    split: Split | None = "train",
    run: str | None = None,
    limit: int | None = None,
    retries: int = 1,
    observation_characters: int = 2000,
    on_trajectory: Callable[[Trajectory], None] = lambda trajectory: None,
) -> Annotated:
    """Let `model` write the reasoning of every step of the buffer's trajectories, and store it in `Step.reasoning`; what it
    wrote of the episode as a whole is the `Trajectory.annotation`.

    What has its reasoning is skipped, so that a stopped call goes on where it was. Which model and prompt wrote it is
    recorded as metrics of the run `annotate`.

    Args: `hosted`, its slots and budget (default as for `ExperienceModel`); `source`, `split`, `run`, what is annotated;
    `limit`, trajectories at most; `retries`, further tries after an answer that cannot be read;
    `observation_characters`, how much of each observation is shown.

    Raises `BudgetExceeded` once what was under way is stored.
    """
    found = replay_buffer.trajectories(source=source, split=split, run=run, errors=False)
    steps = [trajectory for trajectory in found if trajectory.steps]
    waiting = [trajectory for trajectory in steps if not all(step.reasoning for step in trajectory.steps)]
    chosen = waiting[:limit]
    asked = bind_schema(model, SCHEMA) if default_format(model) == "json_schema" else model
    hosted = hosted or hosted_for(model)

    def store(trajectory: Trajectory, messages: list[BaseMessage], answer: AIMessage, last: bool) -> bool:
        if (read := _read(answer, messages, len(trajectory.steps), last=last)) is None:
            return False
        replay_buffer.set_reasoning(trajectory, read.plans, annotation=read.episode)
        on_trajectory(trajectory)
        return True

    prompt = partial(conversation, observation_characters=observation_characters)
    replay_buffer.record_metrics("annotate", 0, {"version": f"{name_of(model)}/{PROMPT}"})
    failed = await _at_once(partial(hosted.aask, asked) if hosted else asked.ainvoke, chosen, prompt, store, retries)
    return Annotated(len(chosen) - len(failed), len(steps) - len(waiting), failed)


Store = Callable[[Trajectory, list[BaseMessage], AIMessage, bool], bool]
"""`store(trajectory, messages, answer, last)`: False for an answer that cannot be read, which the messages then say; on the
last try it raises `PredictionFailed`."""


async def _at_once(
    ask: Callable[[list[BaseMessage]], Awaitable[AIMessage]],
    chosen: Sequence[Trajectory],
    prompt: Callable[[Trajectory], list[BaseMessage]],
    store: Store,
    retries: int,
) -> dict[str, str]:
    """Why some have no annotation after `retries` further tries. Raises `BudgetExceeded` once what is under way is stored."""
    slots = asyncio.Semaphore(64)  # prompts made ahead; the calls themselves are bounded by `Hosted`
    failed: dict[str, str] = {}
    spent: list[BudgetExceeded] = []

    async def one(trajectory: Trajectory) -> None:
        async with slots:
            if spent:
                return
            try:
                messages = prompt(trajectory)
                for attempt in range(retries + 1):
                    if store(trajectory, messages, await ask(messages), attempt == retries):
                        return
            except BudgetExceeded as error:
                spent.append(error)
            except (PredictionFailed, ModelUnavailable) as error:
                failed[f"{trajectory.task.id}/{trajectory.rollout_index}"] = str(error)

    await asyncio.gather(*map(one, chosen))
    if spent:
        raise spent[0]
    return failed


def conversation(trajectory: Trajectory, observation_characters: int = 2000) -> list[BaseMessage]:
    """The prompt: everything recorded is a value in one JSON object."""
    steps = [
        {
            "step": number,
            "observation": step.observation[:observation_characters],
            "action": step.action,
            "valid": step.valid,
            "reward": step.reward,
            "next_observation": step.next_observation[:observation_characters],
        }
        for number, step in enumerate(trajectory.steps, start=1)
    ]
    episode = {"task": trajectory.task.instruction, "success": trajectory.success, "steps": steps}
    return [SystemMessage(load_prompt(PROMPT)), HumanMessage(encoded(episode))]


def read_annotation(text: str, steps: int) -> Annotation:
    """Raises `PredictionFailed` unless the answer has the paper's form, complete, with a plan for each of `steps`."""
    found = json_object(text)
    if found.keys() != SCHEMA["properties"].keys():
        raise PredictionFailed(f"the answer has the keys {sorted(found)}; expected {', '.join(SCHEMA['properties'])}")
    plans = found["transition_plans"]
    if not isinstance(plans, list) or not all(isinstance(plan, dict) for plan in plans):
        raise PredictionFailed("'transition_plans' is no list of objects")
    episode = {key: found[key] for key in ("overall_plan", "success_mode", "failure_mode")}
    texts = [*episode.values(), *(plan.get("transition_plan") for plan in plans)]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise PredictionFailed("a plan or mode is missing, empty or no text")
    if (numbers := [plan.get("step") for plan in plans]) != list(range(1, steps + 1)):
        raise PredictionFailed(f"'transition_plans' has the steps {str(numbers)[:200]}; expected 1 to {steps}, each once")
    return Annotation([plan["transition_plan"].strip() for plan in plans], {key: text.strip() for key, text in episode.items()})


def _read(answer: AIMessage, messages: list[BaseMessage], steps: int, *, last: bool) -> Annotation | None:
    """The annotation, or None after telling the model what was wrong; raises on the last attempt."""
    try:
        return read_annotation(answer.text, steps)
    except PredictionFailed as error:
        if last:
            raise
        messages += [AIMessage(answer.text or "(nothing)"), HumanMessage(f"That could not be read: {error}. Answer again.")]
        return None
