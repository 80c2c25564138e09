"""The experience model: a language model that plays the environment in text (paper, section 4).

`ExperienceModel` turns one action into one `Prediction`; `DreamEnvironment` makes an `Environment` of it, which the same
agents, rollouts and checks take as a real one.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from dreamgym_lg.actions import is_answer
from dreamgym_lg.environment import CheckAction, Environment
from dreamgym_lg.errors import ConfigurationError, PredictionFailed
from dreamgym_lg.experience.hidden_facts import Hidden, Told, hidden_words, next_in_line
from dreamgym_lg.experience.hosted import Chat, Hosted, hosted_for, name_of
from dreamgym_lg.experience.predictions import SCHEMA, in_hindsight
from dreamgym_lg.experience.prompt_formats import (
    FORMS,
    Form,
    FormName,
    Lines,
    bind_schema,
    check_structure,
    first_observation,
    suited,
)
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.token_recorder import unrecorded
from dreamgym_lg.types import Prediction, Step, StepResult, Task, Trajectory

_REMEMBERED_ANSWERS, _REMEMBERED_DEMONSTRATIONS = 100_000, 20_000


class Exchange(NamedTuple):
    """One earlier step of the episode, as the prompt shows it."""

    action: str
    prediction: Prediction
    demonstrations: tuple[Step, ...] = ()


class ExperienceModel:
    """Predicts what follows an action: `(s_{t+1}, r_{t+1})` from task, history, action and top-k demonstrations.

    The same prompt is asked once: concurrent rollouts of a group that act alike share one call, and replaying the same
    actions gives the same world. `version` names the model and prompt behind the answers and is recorded with every
    trajectory; change it through `refreshed`.
    """

    def __init__(
        self,
        model: BaseChatModel | None,
        *,
        replay_buffer: ReplayBuffer | None = None,
        demonstrations: int = 0,
        demonstration_characters: int = 1000,
        form: FormName | None = None,
        instructions: str | None = None,
        hosted: Hosted | None = None,
        retries: int = 1,
        version: str | None = None,
    ) -> None:
        """Args:
        model: It should answer at temperature 0. None for one that is yet to be trained: it can prepare its data, not
            predict.
        demonstrations: k of the retrieval; needs `replay_buffer`.
        demonstration_characters: How much of each of their observations is shown.
        form: How the model is asked and answers. `lines`, for a model that is trained on them; `json`; `json_schema`, JSON
            by the model's own structured output. Default: `lines` with `instructions` or for a local model, else JSON,
            by a schema where the model's profile says that it takes one.
        instructions: The system prompt, "" for none. Default: the newest of `dreamgym_lg/prompts` in this form.
        hosted: Limits, retries and memory of a model behind a network. Default: `Hosted()` for one that takes a key.
        retries: Further tries after an answer that cannot be read, each told what was wrong.
        version: Default: the model's name and the prompt's, e.g. `gpt-5-mini/experience-3`."""
        if demonstrations and replay_buffer is None:
            raise ConfigurationError(f"demonstrations={demonstrations} needs a replay_buffer to retrieve them from")
        self.model, self.replay_buffer, self.k, self.retries = model, replay_buffer, demonstrations, retries
        self.hosted = hosted or hosted_for(model)
        wanted = form or ("lines" if instructions is not None else suited(model))
        if wanted not in FORMS:
            raise ConfigurationError.unknown("form", wanted, FORMS)
        self._structured = wanted == "json_schema"
        self.form: Form = FORMS[wanted](instructions, demonstration_characters)
        self.version = f"{name_of(model)}/{self.form.name}" if version is None else version
        self._answers: dict[str, Prediction] = {}
        self._asking: dict[str, asyncio.Task[Prediction]] = {}
        self._found: dict[tuple[str, str, str], tuple[Step, ...]] = {}

    @cached_property
    def _hidden(self) -> Hidden:
        if self.replay_buffer is None or not isinstance(self.form, Lines):
            return {}
        buffer = self.replay_buffer
        return hidden_words(t for s in ("offline", "real") for t in buffer.trajectories(source=s, split="train"))

    @property
    def grounded(self) -> bool:
        """Whether real transitions are shown to it: it retrieves, and there is something to retrieve."""
        return bool(self.k and self.replay_buffer is not None and self.replay_buffer.count("steps", split="train"))

    def refreshed(self, version: str) -> None:
        """The weights behind the model have changed, and the buffer may hold more: forget what came of them."""
        self.version = version
        self._answers.clear()
        self._found.clear()
        self.__dict__.pop("_hidden", None)

    def demonstrations(self, observation: str, action: str, task: Task) -> tuple[Step, ...]:
        """The k stored real transitions nearest to (observation, action), none of them of the same task."""
        if not self.k or self.replay_buffer is None:
            return ()
        key = (observation, action, task.id)
        if key not in self._found:
            found = tuple(self.replay_buffer.similar(observation, action, k=self.k, exclude_task=task.id))
            _keep(self._found, key, found, _REMEMBERED_DEMONSTRATIONS)
            return found
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
        messages: list[BaseMessage] = [SystemMessage(self.form.head(task))]
        last, score = first_observation(task), 0.0
        first: str | None = last
        told = [Told(action, said.observation, said.reward, said.valid, said.terminated) for action, said, _ in history]
        *turns, turn = next_in_line(task, told, self._hidden)
        for exchange, its_turn in zip(history, turns, strict=True):
            asked = self.form.ask(first, exchange.demonstrations, score, last, exchange.action, its_turn)
            messages += [HumanMessage(asked), AIMessage(self.form.answer(exchange.prediction))]
            first, last, score = None, exchange.prediction.observation, score + exchange.prediction.reward
        messages.append(HumanMessage(self.form.ask(first, found, score, last, action, turn)))
        return messages

    def predict(self, task: Task, history: Sequence[Exchange], action: str, found: Sequence[Step] = ()) -> Prediction:
        """Answer one action. Raises `PredictionFailed` after `retries` unreadable answers; what `Hosted.ask` raises."""
        messages = self.messages(task, history, action, found)
        key = self._key(messages)
        if (known := self._known(key)) is not None:
            return known
        for attempt in range(self.retries + 1):
            with unrecorded():
                answer = self.hosted.ask(self._asked, messages) if self.hosted else self._asked.invoke(messages)
            if (prediction := self._read(answer, messages, attempt, action, found)) is not None:
                return self._remember(key, prediction)
        raise AssertionError("unreachable: the last attempt raises")

    async def apredict(self, task: Task, history: Sequence[Exchange], action: str, found: Sequence[Step] = ()) -> Prediction:
        """As `predict`; the same prompt asked at the same time is one call."""
        messages = self.messages(task, history, action, found)
        key = self._key(messages)
        if (known := self._known(key)) is not None:
            return known
        if key not in self._asking:
            self._asking[key] = asyncio.create_task(self._ask_model(key, messages, action, found))
            self._asking[key].add_done_callback(lambda _: self._asking.pop(key, None))
        return await asyncio.shield(self._asking[key])

    async def _ask_model(self, key: str, messages: list[BaseMessage], action: str, found: Sequence[Step]) -> Prediction:
        for attempt in range(self.retries + 1):
            with unrecorded():
                if self.hosted:
                    answer = await self.hosted.aask(self._asked, messages)
                else:
                    answer = await self._asked.ainvoke(messages)
            if (prediction := self._read(answer, messages, attempt, action, found)) is not None:
                return self._remember(key, prediction)
        raise AssertionError("unreachable: the last attempt raises")

    @cached_property
    def _asked(self) -> Chat:
        if self.model is None:
            raise ConfigurationError("this ExperienceModel has no model yet: it prepares training data and cannot predict")
        return bind_schema(self.model, SCHEMA) if self._structured else self.model

    def _read(
        self, answer: AIMessage, messages: list[BaseMessage], attempt: int, action: str, found: Sequence[Step]
    ) -> Prediction | None:
        """The prediction, or None after telling the model what was wrong; raises on the last attempt."""
        try:
            prediction = self.form.read(answer.text)
            check_structure(prediction, action, found)
            return prediction
        except PredictionFailed as error:
            if attempt == self.retries:
                raise
            said = answer.text or "(nothing)"  # providers refuse an empty message
            messages += [AIMessage(said), HumanMessage(f"That could not be read: {error}. Answer again, in the form.")]
            return None

    def _key(self, messages: Sequence[BaseMessage]) -> str:
        """What an answer is remembered under: model, prompt and version, and every text of the conversation."""
        parts = (name_of(self.model), self.form.name, self.version, *(message.text for message in messages))
        return sha256("".join(f"{len(part)}:{part}" for part in parts).encode("utf-8", "replace")).hexdigest()

    def _known(self, key: str) -> Prediction | None:
        if key not in self._answers and self.hosted and (stored := self.hosted.recall(key)) is not None:
            _keep(self._answers, key, Prediction(**json.loads(stored)), _REMEMBERED_ANSWERS)
        return self._answers.get(key)

    def _remember(self, key: str, prediction: Prediction) -> Prediction:
        _keep(self._answers, key, prediction, _REMEMBERED_ANSWERS)
        if self.hosted:
            self.hosted.remember(key, json.dumps(prediction._asdict()))
        return prediction


def _keep(kept: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    """Put a value into a dict that forgets its oldest beyond `limit`."""
    if len(kept) >= limit:
        kept.pop(next(iter(kept)), None)
    kept[key] = value


class DreamEnvironment(Environment):
    """An environment played by an experience model; nothing real is touched. `check_action`: the real environment's own."""

    def __init__(self, experience: ExperienceModel, *, check_action: CheckAction | None = None) -> None:
        self.experience = experience
        self._check_action = check_action
        self._task: Task | None = None
        self._history: list[Exchange] = []
        self._observation = ""

    def check_action(self, action: str, observations: Sequence[str]) -> str | None:
        return self._check_action(action, observations) if self._check_action else None

    def reset(self, task: Task) -> str:
        if not first_observation(task):
            raise ConfigurationError(
                f"task {task.id!r} has no metadata['observation'] and no instruction: a dream of it has nothing to begin with"
            )
        self._task, self._history = task, []
        self._observation = first_observation(task)
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
            right = in_hindsight(step, success=trajectory.success)
            found = experience.demonstrations(step.observation, step.action, trajectory.task)
            exchanges.append(Exchange(step.action, right, found))
        seen.append(step.next_observation)
    return exchanges


def to_conversation(
    experience: ExperienceModel, trajectory: Trajectory, check_action: CheckAction | None = None
) -> list[BaseMessage]:
    """A trajectory as the conversation `experience` should have held, for its training; empty if it was asked nothing."""
    exchanges = recorded_exchanges(experience, trajectory, check_action)
    return experience.messages(trajectory.task, exchanges, "", ())[:-1] if exchanges else []
