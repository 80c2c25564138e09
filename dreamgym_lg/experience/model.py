"""The experience model: a language model that answers an agent's actions as the environment would (paper, section 4)."""

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from hashlib import sha256
from random import Random
from typing import Any, TypeVar

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from dreamgym_lg.actions import is_answer
from dreamgym_lg.errors import ConfigurationError, ContextExceeded, PredictionFailed
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experience.hidden_facts import HiddenFacts, told, world_seed
from dreamgym_lg.experience.notes import check_notes, notes_of, with_notes, write_notes
from dreamgym_lg.experience.predictions import Exchange, believed, check_returns, check_structure
from dreamgym_lg.experience.prompt_choice import PromptFormatName, bind_schema, create_format
from dreamgym_lg.experience.prompt_formats import PromptFormat, Question, first_observation, is_tool_task, schemas
from dreamgym_lg.experience.rules import NOTHING, calls_made, played, untold, written
from dreamgym_lg.experience.similar_successes import SimilarSuccesses
from dreamgym_lg.hosted.chat_model import Chat, name_of
from dreamgym_lg.hosted.hosted import Hosted, hosted_for
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.token_recorder import TrainablePolicy, unrecorded
from dreamgym_lg.types import Prediction, Step, Task, Trajectory

_REMEMBERED_ANSWERS, _REMEMBERED_DEMONSTRATIONS = 100_000, 20_000
_NOTES_TRIES, _MAX_NOTES_FAILURES = 3, 24
"""How often a world's notes are asked for, where they cannot be read; and after how many worlds in a row whose notes could not
be read no more are asked for."""

logger = logging.getLogger(__name__)

Shown = Callable[[Task, Sequence[Exchange], str], tuple[Task, Sequence[Exchange]] | None]
"""(task, history, action) -> what of the episode the experience model is shown, as a task and a history; None: it is not asked,
since traces decide what follows (`Grounds`)."""

Key = TypeVar("Key")
Value = TypeVar("Value")


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
        demonstration_characters: int | None = None,
        prompt_format: PromptFormat | PromptFormatName | None = None,
        instructions: str | None = None,
        hidden_facts: HiddenFacts | None = None,
        notes: bool = False,
        writes: Collection[str] = (),
        shown: Shown | None = None,
        hosted: Hosted | None = None,
        retries: int = 1,
        version: str | None = None,
    ) -> None:
        """Args:
        model: It should answer at temperature 0. None for one that is yet to be trained: it can prepare its data, not
            predict.
        demonstrations: k of the retrieval; needs `replay_buffer`.
        demonstration_characters: How much of each of their texts is shown. Default: 1000.
        prompt_format: How the model is asked and answers. `lines`, for a model that is trained on them; `json`;
            `json_schema`, JSON by the model's own structured output; or any `PromptFormat`, which then holds its own
            instructions. Default: `lines` with `instructions` or for a local model, else JSON, by a schema where the model's
            profile says that it takes one.
        instructions: The system prompt, "" for none. Default: the newest of `dreamgym_lg/prompts` in this format.
        hidden_facts: What the world reveals next, drawn once by its seed and shown in every prompt. Default: nothing.
        notes: Whether it writes down, before a tool agent's first step, what the task leaves open (`noted`): one call for each
            task and world seed.
        writes: A tool agent's tools that change its world; what the others answer tells which recorded successes are like
            an episode, and may be noted.
        shown: What of an episode it is asked with. Default: all of it.
        hosted: Limits, retries and memory of a model behind a network. Default: `Hosted()` for one that takes a key.
        retries: Further tries after an answer that cannot be read, each told what was wrong.
        version: Default: the model's name and the prompt's, e.g. `gpt-7/experience-6`. With `hidden_facts`,
            `+hidden_facts` is appended to it, and with `notes`, `+notes`.

        Raises `ConfigurationError` for an unknown format, for demonstrations without a buffer, and for options of a format
        beside a `PromptFormat` object.
        """
        if demonstrations and replay_buffer is None:
            raise ConfigurationError(f"demonstrations={demonstrations} needs a replay_buffer to retrieve them from")
        self.model, self.replay_buffer, self.k, self.retries = model, replay_buffer, demonstrations, retries
        self.hosted = hosted or hosted_for(model)
        self.hidden_facts, self.notes, self.writes = hidden_facts, notes, frozenset(writes)
        self.shown = shown
        self.prompt_format = create_format(prompt_format, model, instructions, demonstration_characters)
        self._set_version(f"{name_of(model)}/{self.prompt_format.name}" if version is None else version)
        self._answers: dict[str, Prediction] = {}
        self._notes: dict[str, str] = {}
        self._notes_failures = 0
        self._asking: dict[str, asyncio.Task[Any]] = {}
        self._found: dict[tuple[str, str, str], tuple[Step, ...]] = {}
        self._successes: SimilarSuccesses | None = None

    @property
    def grounded(self) -> bool:
        """Whether real transitions are shown to it: it retrieves, and there is something to retrieve."""
        return bool(self.k and self.replay_buffer is not None and self.replay_buffer.count("steps", split="train"))

    def refreshed(self, version: str) -> None:
        """The weights behind the model have changed, and the buffer may hold more: forget what came of them."""
        self._set_version(version)
        self._answers.clear()
        self._notes.clear()
        self._notes_failures = 0
        self._found.clear()
        self._successes = None

    def _set_version(self, version: str) -> None:
        self.version = f"{version}{'+hidden_facts' if self.hidden_facts else ''}{'+notes' if self.notes else ''}"

    def demonstrations(self, observation: str, action: str, task: Task, history: Sequence[Exchange] = ()) -> tuple[Step, ...]:
        """The k stored real transitions nearest to (observation, action), none of them of the same task.

        For a tool agent's final answer, those of the successes of tasks like this one, with answers like those in `history`
        (`SimilarSuccesses`).
        """
        if not self.k or self.replay_buffer is None:
            return ()
        if _ends(task, action):
            calls = [played(exchange) for exchange in history]
            if successes := self._similar_successes(self.replay_buffer).nearest(task, calls, self.k):
                return successes
        key = (observation, action, task.id)
        if key not in self._found:
            found = tuple(self.replay_buffer.similar(observation, action, k=self.k, exclude_task=task.id))
            _keep(self._found, key, found, _REMEMBERED_DEMONSTRATIONS)
            return found
        return self._found[key]

    def untold(self, task: Task, history: Sequence[Exchange], action: str) -> list[str]:
        """What a tool agent's final answer claims, and nobody told: a status that was not looked up, another order's number."""
        told = self._similar_successes(self.replay_buffer).told if self.replay_buffer is not None else frozenset()
        return untold(task, [played(exchange) for exchange in history], action, told)

    def _calls(self, task: Task, history: Sequence[Exchange], action: str) -> str:
        """Where `action` is a tool agent's final answer, what it is judged by: calls so far, unfounded claims; else ""."""
        if not _ends(task, action):
            return ""
        claims = ", ".join(self.untold(task, history, action)) or NOTHING
        return f"{written(calls_made(task, [played(exchange) for exchange in history]))}\ntold by nobody: {claims}"

    def _similar_successes(self, replay_buffer: ReplayBuffer) -> SimilarSuccesses:
        if self._successes is None:
            self._successes = SimilarSuccesses(replay_buffer.trajectories(split="train", errors=False), self.writes)
        return self._successes

    def retrieve(self, trajectories: Sequence[Trajectory]) -> None:
        """Look up the demonstrations of all these steps at once, a task at a time: much faster than one by one."""
        queries: dict[str, dict[tuple[str, str], None]] = {}
        for trajectory in trajectories if self.k else ():
            pairs = queries.setdefault(trajectory.task.id, {})
            asked = (step for step in trajectory.steps if not _ends(trajectory.task, step.action))
            pairs.update(dict.fromkeys((step.observation, step.action) for step in asked))
        for task_id, pairs in queries.items():
            assert self.replay_buffer is not None
            found = self.replay_buffer.similar_many(list(pairs), self.k, exclude_task=task_id)
            self._found.update({(*pair, task_id): tuple(steps) for pair, steps in zip(pairs, found, strict=True)})

    def asked(self, task: Task, history: Sequence[Exchange], action: str) -> bool:
        """Whether it is there for such a step."""
        return self.shown is None or self.shown(task, history, action) is not None

    def messages(self, task: Task, history: Sequence[Exchange], action: str, found: Sequence[Step]) -> list[BaseMessage]:
        """The prompt of one step: a conversation that only grows, so that a local model's key-value cache is kept."""
        if self.shown is not None:
            task, history = self.shown(task, history, action) or (task, history)
        messages: list[BaseMessage] = [SystemMessage(self.prompt_format.head(task))]
        seen, score = [first_observation(task)], 0.0
        steps = [*((exchange.action, exchange.demonstrations) for exchange in history), (action, found)]
        for number, ((acted, shown), fact) in enumerate(zip(steps, self.facts(task, history), strict=True)):
            if number:
                answered = history[number - 1].prediction
                messages.append(AIMessage(self.prompt_format.answer(answered)))
                seen, score = [*seen, answered.observation], score + answered.reward
            calls = self._calls(task, history[:number], acted)
            question = Question(acted, seen=seen, score=score, demonstrations=shown, hidden=fact, calls=calls)
            messages.append(HumanMessage(self.prompt_format.ask(task, question)))
        return messages

    def facts(self, task: Task, history: Sequence[Exchange]) -> Sequence[str]:
        """One hidden fact for each step of `history` and one for the step to come; "" where there is none."""
        if self.hidden_facts is None:
            return [""] * (len(history) + 1)
        facts = self.hidden_facts(task, history, world_seed(task))
        if len(facts) != len(history) + 1:
            raise ConfigurationError(
                f"hidden_facts gave {len(facts)} facts after {len(history)} steps: it has to give one for each step and one "
                'for the step to come ("" for none)'
            )
        return facts

    def predict(self, task: Task, history: Sequence[Exchange], action: str, found: Sequence[Step] = ()) -> Prediction:
        """Answer one action. Raises `PredictionFailed` after `retries` unreadable answers, and once an episode has outgrown a
        local model's context; what `Hosted.ask` raises.
        """
        messages = self.messages(task, history, action, found)
        key = self._key(messages)
        if (known := self._known(key)) is not None:
            return known
        for attempt in range(self.retries + 1):
            with unrecorded(), _outgrown(messages):
                answer = self.hosted.ask(self._asked, messages) if self.hosted else self._asked.invoke(messages)
            if (prediction := self._read(answer, messages, attempt, task, history, action, found)) is not None:
                return self._remember(key, prediction)
        raise AssertionError("unreachable: the last attempt raises")

    async def apredict(self, task: Task, history: Sequence[Exchange], action: str, found: Sequence[Step] = ()) -> Prediction:
        """As `predict`; the same prompt asked at the same time is one call."""
        messages = self.messages(task, history, action, found)
        key = self._key(messages)
        if (known := self._known(key)) is not None:
            return known
        return await self._once(key, partial(self._ask_model, key, messages, task, history, action, found))

    async def _once(self, key: str, ask: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        """What `ask` gives; whoever asks for the same at the same time gets it too."""
        if key not in self._asking:
            self._asking[key] = asyncio.create_task(ask())
            self._asking[key].add_done_callback(lambda _: self._asking.pop(key, None))
        answer: Value = await asyncio.shield(self._asking[key])
        return answer

    async def _ask_model(
        self, key: str, messages: list[BaseMessage], task: Task, history: Sequence[Exchange], action: str, found: Sequence[Step]
    ) -> Prediction:
        for attempt in range(self.retries + 1):
            answer = await self._ainvoke(self._asked, messages)
            if (prediction := self._read(answer, messages, attempt, task, history, action, found)) is not None:
                return self._remember(key, prediction)
        raise AssertionError("unreachable: the last attempt raises")

    async def _ainvoke(self, model: Chat, messages: list[BaseMessage]) -> AIMessage:
        with unrecorded(), _outgrown(messages):
            return await (self.hosted.aask(model, messages) if self.hosted else model.ainvoke(messages))

    @cached_property
    def _asked(self) -> Chat:
        model, schema = self._given_model(), self.prompt_format.schema
        return bind_schema(model, schema) if schema is not None else model

    def _given_model(self) -> BaseChatModel:
        if self.model is None:
            raise ConfigurationError("this ExperienceModel has no model yet: it prepares training data and cannot predict")
        return self.model

    # --- notes ---------------------------------------------------------------------------------------------------------

    def noted(self, task: Task) -> Task:
        """The task in the world of the notes that the model writes for it, once for each task and `world_seed`; the task as
        it is without `notes`, where no tools are called, and where it has notes.

        A local model's are sampled at temperature 1 with the world's seed, and all that follows is the most likely; a hosted
        model reads the seed in its prompt. Notes that cannot be read after some tries are none, and a warning says so.
        """
        if not self._takes_notes(task):
            return task
        return with_notes(task, run_lasting(self._write_notes(task, self._notes_key(task))))

    async def anoted(self, task: Task) -> Task:
        """As `noted`; the same world asked for at the same time is one call."""
        if not self._takes_notes(task):
            return task
        key = self._notes_key(task)
        return with_notes(task, await self._once(key, partial(self._write_notes, task, key)))

    def notes_messages(self, task: Task) -> list[BaseMessage]:
        """The prompt that asks for the notes of a task without any."""
        return [SystemMessage(self.prompt_format.head(task)), HumanMessage(self.prompt_format.ask_notes(task, self._recorded))]

    def _takes_notes(self, task: Task) -> bool:
        return self.notes and is_tool_task(task) and notes_of(task) is None

    def _notes_key(self, task: Task) -> str:
        return self._key([SystemMessage(self.prompt_format.head(task))], "notes", task.id, str(world_seed(task)))

    def _recorded(self, tool: str) -> Sequence[str]:
        """Answers that the tool was recorded to give; none for one that writes."""
        return self.replay_buffer.answers(tool) if self.replay_buffer is not None and tool not in self.writes else ()

    async def _write_notes(self, task: Task, key: str) -> str:
        if key not in self._notes and self.hosted and (stored := self.hosted.recall(key)) is not None:
            self._notes[key] = stored
        if key in self._notes:
            return self._notes[key]
        if self._notes_failures >= _MAX_NOTES_FAILURES:
            return ""
        model, messages, notes = self._given_model(), self.notes_messages(task), ""
        sampled = isinstance(model, TrainablePolicy)
        for attempt in range(_NOTES_TRIES):
            seed = Random(f"{task.id}/{world_seed(task)}/{attempt}").getrandbits(40)
            try:
                answer = await self._ainvoke(model.bind(temperature=1.0, seed=seed) if sampled else model, messages)
                found = self.prompt_format.read_notes(answer.text)
                check_notes(found, [tool["name"] for tool in schemas(task) if tool["name"] not in self.writes], self._recorded)
                notes, self._notes_failures = write_notes(found), 0
                break
            except PredictionFailed as error:
                if attempt == _NOTES_TRIES - 1:
                    logger.warning("no notes for the world of task %s, which leaves its lookups open: %s", task.id, error)
                    self._notes_failures += 1
                    if self._notes_failures == _MAX_NOTES_FAILURES:
                        logger.warning(
                            "no notes could be read of %d worlds in a row: no more are asked for", _MAX_NOTES_FAILURES
                        )
                elif not sampled:
                    messages = [*messages, *_mended(answer, error)]
        _keep(self._notes, key, notes, _REMEMBERED_ANSWERS)
        if self.hosted:
            self.hosted.remember(key, notes)
        return notes

    def _read(
        self,
        answer: AIMessage,
        messages: list[BaseMessage],
        attempt: int,
        task: Task,
        history: Sequence[Exchange],
        action: str,
        found: Sequence[Step],
    ) -> Prediction | None:
        """The prediction, or None after telling the model what was wrong; raises on the last attempt."""
        try:
            prediction = believed(self.prompt_format.read(answer.text), _score(history))
            check_structure(prediction, action, found, self.replay_buffer.answers if self.replay_buffer else lambda tool: ())
            check_returns(prediction, action, schemas(task))
            return told(self.hidden_facts, action, prediction, self.facts(task, history)[-1])
        except PredictionFailed as error:
            if attempt == self.retries:
                raise
            messages += _mended(answer, error)
            return None

    def _key(self, messages: Sequence[BaseMessage], *more: str) -> str:
        """What an answer is remembered under: model, prompt and version, every text of the conversation, and `more`."""
        parts = (name_of(self.model), self.prompt_format.name, self.version, *(message.text for message in messages), *more)
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


@contextmanager
def _outgrown(messages: Sequence[BaseMessage]) -> Iterator[None]:
    """An episode that outgrows the model's context ends in `PredictionFailed`, as an outcome of the dream: played again it
    would do so again. A first question that does not fit is the settings' fault, and stays a `ContextExceeded`."""
    try:
        yield
    except ContextExceeded as error:
        if not any(isinstance(message, AIMessage) for message in messages):
            raise
        raise PredictionFailed(f"the dreamed episode has outgrown the experience model: {error}") from error


def _mended(answer: AIMessage, error: PredictionFailed) -> list[BaseMessage]:
    """What asks again behind an answer that could not be read."""
    said = answer.text or "(nothing)"  # providers refuse an empty message
    return [AIMessage(said), HumanMessage(f"That could not be read: {error}. Answer again, in the form.")]


def _score(history: Sequence[Exchange]) -> float:
    return sum(exchange.prediction.reward for exchange in history)


def _ends(task: Task, action: str) -> bool:
    """Whether the action is a tool agent's final answer."""
    return is_tool_task(task) and is_answer(action)


def _keep(kept: dict[Key, Value], key: Key, value: Value, limit: int) -> None:
    """Put a value into a dict that forgets its oldest beyond `limit`."""
    if len(kept) >= limit:
        kept.pop(next(iter(kept)), None)
    kept[key] = value
