"""The experience model: a language model that plays the environment in text (paper, section 4).

`ExperienceModel` turns one action into one `Prediction`; `DreamEnvironment` makes an `Environment` of it, which the same
agents, rollouts and checks take as a real one.
"""

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from dreamgym_lg.environment import CheckAction, Environment
from dreamgym_lg.errors import ConfigurationError, PredictionFailed
from dreamgym_lg.policy import unrecorded
from dreamgym_lg.prediction import INSTRUCTIONS, annotate, parse_prediction, render_prediction
from dreamgym_lg.replay import ReplayBuffer
from dreamgym_lg.tools import is_answer
from dreamgym_lg.types import Prediction, Step, StepResult, Task, Trajectory

Explain = Callable[[Sequence[str], Step], str]
"""Why a recorded step had its outcome, in a few words: (observations before it, the step) -> reason, or ""."""


class Exchange(NamedTuple):
    """One earlier step of the episode, as the prompt shows it."""

    action: str
    prediction: Prediction
    demonstrations: tuple[Step, ...] = ()


class ExperienceModel:
    """Predicts what follows an action: `(s_{t+1}, r_{t+1})` from task, history, action and top-k demonstrations.

    The same prompt is asked once: concurrent rollouts of a group that act alike share one call, and replaying the same
    actions gives the same world. `version` names the weights or prompt behind the answers; change it through `refreshed`.
    """

    def __init__(
        self,
        model: BaseChatModel | None,
        *,
        replay_buffer: ReplayBuffer | None = None,
        demonstrations: int = 0,
        demonstration_characters: int = 1000,
        instructions: str = INSTRUCTIONS,
        explain: Explain = lambda observations, step: "",
        retries: int = 1,
        version: str = "1",
    ) -> None:
        """Args: `model`, which should answer at temperature 0, None for one that is yet to be trained: it can prepare its
        data, not predict; `demonstrations`, k of the retrieval (needs `replay_buffer`); `demonstration_characters`, how
        much of each of their observations is shown; `explain`, what the reasoning of its training data says; `retries`,
        further tries after an answer that cannot be read, each told what was wrong."""
        if demonstrations and replay_buffer is None:
            raise ConfigurationError(f"demonstrations={demonstrations} needs a replay_buffer to retrieve them from")
        self.model, self.replay_buffer, self.k = model, replay_buffer, demonstrations
        self.demonstration_characters = demonstration_characters
        self.instructions, self.explain, self.retries, self.version = instructions, explain, retries, version
        self._answers: OrderedDict[tuple[str, ...], Prediction] = OrderedDict()
        self._asking: dict[tuple[str, ...], asyncio.Task[Prediction]] = {}
        self._found: dict[tuple[str, str, str], tuple[Step, ...]] = {}

    def refreshed(self, version: str) -> None:
        """The weights behind the model have changed, and the buffer may hold more: forget answers and demonstrations."""
        self.version = version
        self._answers.clear()
        self._found.clear()

    def demonstrations(self, observation: str, action: str, task: Task) -> tuple[Step, ...]:
        """The k stored real transitions nearest to (observation, action), none of them of the same task."""
        if not self.k or self.replay_buffer is None:
            return ()
        key = (observation, action, task.id)
        if key not in self._found:
            self._found[key] = tuple(self.replay_buffer.similar(observation, action, k=self.k, exclude_task=task.id))
        return self._found[key]

    def retrieve(self, trajectories: Sequence[Trajectory]) -> None:
        """Look up the demonstrations of all these steps at once, a task at a time: much faster than one by one."""
        queries: dict[str, dict[tuple[str, str], None]] = {}
        for trajectory in trajectories if self.k else ():
            pairs = queries.setdefault(trajectory.task.id, {})
            pairs.update(dict.fromkeys((step.observation, step.action) for step in trajectory.steps))
        for task_id, pairs in queries.items():
            assert self.replay_buffer is not None
            found = self.replay_buffer.similar_many(list(pairs), self.k, exclude_task=task_id)
            self._found.update({(*pair, task_id): tuple(steps) for pair, steps in zip(pairs, found, strict=True)})

    def messages(self, task: Task, history: Sequence[Exchange], action: str, found: Sequence[Step]) -> list[BaseMessage]:
        """The prompt of one step: a conversation that only grows, so that a local model's key-value cache is kept."""
        head = [self.instructions, task.instruction, *_tool_instructions(task)]
        messages: list[BaseMessage] = [SystemMessage("\n".join(part for part in head if part))]
        last, score = str(task.metadata["observation"]), 0.0
        first = f"{last}\n"
        for exchange in history:
            asked = self._ask(exchange.action, exchange.demonstrations, score, last)
            messages += [HumanMessage(first + asked), AIMessage(render_prediction(exchange.prediction))]
            first, last, score = "", exchange.prediction.observation, score + exchange.prediction.reward
        messages.append(HumanMessage(first + self._ask(action, found, score, last)))
        return messages

    def predict(self, task: Task, history: Sequence[Exchange], action: str, found: Sequence[Step] = ()) -> Prediction:
        """Answer one action. Raises `PredictionFailed` after `retries` unreadable answers."""
        messages = self.messages(task, history, action, found)
        key = (self.version, *(message.text for message in messages))
        if key not in self._answers:
            for attempt in range(self.retries + 1):
                with unrecorded():
                    answer = self._asked().invoke(messages)
                if (prediction := self._read(answer, messages, attempt)) is not None:
                    self._remember(key, prediction)
                    break
        return self._answers[key]

    async def apredict(
        self, task: Task, history: Sequence[Exchange], action: str, found: Sequence[Step] = ()
    ) -> Prediction:
        """As `predict`; the same prompt asked at the same time is one call."""
        messages = self.messages(task, history, action, found)
        key = (self.version, *(message.text for message in messages))
        if key in self._answers:
            return self._answers[key]
        if key not in self._asking:
            self._asking[key] = asyncio.create_task(self._ask_model(key, messages))
            self._asking[key].add_done_callback(lambda _: self._asking.pop(key, None))
        return await asyncio.shield(self._asking[key])

    async def _ask_model(self, key: tuple[str, ...], messages: list[BaseMessage]) -> Prediction:
        for attempt in range(self.retries + 1):
            with unrecorded():
                answer = await self._asked().ainvoke(messages)
            if (prediction := self._read(answer, messages, attempt)) is not None:
                self._remember(key, prediction)
                return prediction
        raise AssertionError("unreachable: the last attempt raises")

    def _ask(self, action: str, found: Sequence[Step], score: float, last: str) -> str:
        """Demonstrations, the action, and what a small model does not see by itself.

        That is the score so far (it tells which progress is the last one), and whether the last observation named the
        action's words.
        """
        shown = []
        for step in found:
            right = annotate(step, success=step.terminated and step.reward > 0)
            short = right._replace(observation=right.observation[: self.demonstration_characters])
            before = step.observation[-self.demonstration_characters :]
            shown.append(f"seen: {before}\n{_quoted(step.action)}\n{render_prediction(short)}")
        named = set(re.findall(r"[\w'-]+", last.lower()))
        found_words = [word.lower() in named for word in action.split()]
        share = "all" if all(found_words) else "some" if any(found_words) else "none"
        head = f"now, with a score of {round(score, 2):g}:"
        return "\n".join([*shown, head, _quoted(action), f"words just named: {share}"])

    def _asked(self) -> BaseChatModel:
        if self.model is None:
            raise ConfigurationError("this ExperienceModel has no model yet: it prepares training data and cannot predict")
        return self.model

    def _read(self, answer: AIMessage, messages: list[BaseMessage], attempt: int) -> Prediction | None:
        """The prediction, or None after telling the model what was wrong; raises on the last attempt."""
        try:
            return parse_prediction(answer.text)
        except PredictionFailed as error:
            if attempt == self.retries:
                raise
            messages += [answer, HumanMessage(f"That could not be read: {error}. Answer again, in the form.")]
            return None

    def _remember(self, key: tuple[str, ...], prediction: Prediction) -> None:
        self._answers[key] = prediction
        while len(self._answers) > 100_000:
            self._answers.popitem(last=False)


RUBRIC = (
    "it is a success only if the calls made so far really did everything that the task asks for, with the right arguments, "
    "and the answer says nothing that they do not show."
)
"""How a final answer is judged where the task brings no `metadata["rubric"]` of its own."""


def _tool_instructions(task: Task) -> list[str]:
    """What a tool agent's world needs besides: what can be called, and how its final answer is judged."""
    tools = task.metadata.get("tools")
    if not tools:
        return []
    schemas = [json.dumps(tool["function"], ensure_ascii=False, sort_keys=True) for tool in tools]
    rubric = task.metadata.get("rubric") or RUBRIC
    return [
        'The agent acts by calling tools: {"name": ..., "arguments": ...}. Answer as the tool itself would. The tools:',
        *schemas,
        f'{{"answer": ...}} ends the episode: the status is then success or failure, the observation (nothing), and {rubric}',
    ]


def _quoted(action: str) -> str:
    """The action on one line, so that nothing in it can pass for a part of the prompt."""
    return f"> {' '.join(action.split())}"


class DreamEnvironment(Environment):
    """An environment played by an experience model. Nothing real is touched.

    Args: `check_action`, the real environment's own check, so that both refuse the same actions.
    """

    def __init__(self, experience: ExperienceModel, *, check_action: CheckAction | None = None) -> None:
        self.experience = experience
        self._check_action = check_action
        self._task: Task | None = None
        self._history: list[Exchange] = []
        self._observation = ""

    def check_action(self, action: str, observations: Sequence[str]) -> str | None:
        return self._check_action(action, observations) if self._check_action else None

    def reset(self, task: Task) -> str:
        if not task.metadata.get("observation"):
            raise ConfigurationError(f"task {task.id!r} has no metadata['observation'], with which a dream of it begins")
        self._task, self._history = task, []
        self._observation = str(task.metadata["observation"])
        return self._observation

    async def areset(self, task: Task) -> str:
        return self.reset(task)

    def show_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        task = self._playing()
        self._task = replace(task, metadata={**task.metadata, "tools": list(tools)})

    def step(self, action: str) -> StepResult:
        task = self._playing()
        found = self.experience.demonstrations(self._observation, action, task)
        return self._advance(action, found, self.experience.predict(task, self._history, action, found))

    async def astep(self, action: str) -> StepResult:
        task = self._playing()
        found = self.experience.demonstrations(self._observation, action, task)
        return self._advance(action, found, await self.experience.apredict(task, self._history, action, found))

    def _playing(self) -> Task:
        if self._task is None:
            raise RuntimeError("step before reset, or after the episode's end: call reset(task)")
        return self._task

    def _advance(self, action: str, found: tuple[Step, ...], prediction: Prediction) -> StepResult:
        self._history.append(Exchange(action, prediction, found))
        self._observation = prediction.observation
        if "tools" in self._playing().metadata:  # a tool ends nothing: the agent does, with its answer
            prediction = prediction._replace(terminated=is_answer(action), success=prediction.success and is_answer(action))
        if prediction.terminated:
            self._task = None
        info = {"success": prediction.success, "valid": prediction.valid, "reasoning": prediction.reasoning}
        return StepResult(prediction.observation, prediction.reward, prediction.terminated, False, info)


def recorded_exchanges(
    experience: ExperienceModel, trajectory: Trajectory, check_action: CheckAction | None = None
) -> list[Exchange]:
    """What `experience` should have answered in a recorded episode.

    Actions that `check_action` refuses never reach an experience model, neither here nor in the dream.
    """
    seen = [str(trajectory.task.metadata.get("observation", ""))]
    exchanges = []
    for step in trajectory.steps:
        if check_action is None or check_action(step.action, seen) is None:
            right = annotate(step, success=trajectory.success, why=experience.explain(seen, step))
            found = experience.demonstrations(step.observation, step.action, trajectory.task)
            exchanges.append(Exchange(step.action, right, found))
        seen.append(step.next_observation)
    return exchanges


def to_conversation(
    experience: ExperienceModel, trajectory: Trajectory, check_action: CheckAction | None = None
) -> list[BaseMessage]:
    """A trajectory as the conversation that `experience` should have held: its supervised training data.

    Empty if no step of it had to be answered.
    """
    exchanges = recorded_exchanges(experience, trajectory, check_action)
    if not exchanges:
        return []
    *history, last = exchanges
    messages = experience.messages(trajectory.task, history, last.action, last.demonstrations)
    return [*messages, AIMessage(render_prediction(last.prediction))]
