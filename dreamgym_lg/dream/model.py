"""The paper's reasoning experience model: a language model plays the environment (section 4)."""

import json
from collections import defaultdict
from collections.abc import Sequence

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from dreamgym_lg.actions import is_answer
from dreamgym_lg.dream.parts import Answer, Episode, Verdict
from dreamgym_lg.dream.prompter import ChatModelPart, Prompter, add_to_cache, fail_if_prompt_too_long
from dreamgym_lg.dream.prompts import Prediction, PromptFormatName, Question, create_format, in_hindsight
from dreamgym_lg.dream.schemas import fits_returns, returns_schema
from dreamgym_lg.errors import ConfigurationError, PredictionFailed
from dreamgym_lg.hosted import Hosted, name_of
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.tasks import first_observation, is_tool_task
from dreamgym_lg.types import Step, Task, Trajectory

_MAX_DEMONSTRATIONS = 20_000
DEFAULT_DEMONSTRATIONS = 3
"""k of the paper's top-k retrieval, where there is a replay buffer."""


class Model(ChatModelPart):
    """The responder that is a language model, with retrieval and reasoning.

    The same prompt is asked only once, so that the episodes of a group share a world. `version` names the model and prompt
    behind the answers and is recorded with every trajectory.

    Args:
        model: A chat model that answers at temperature 0, or a name like `openai:gpt-5.4-mini`. None for a model that is yet to
            be trained: this object prepares its training data, and cannot answer.
        replay_buffer: Real transitions. Each step's prompt shows the nearest ones from the task's environment.
        demonstrations: Number of transitions shown: k of the paper's retrieval. Default: 3 with a replay buffer, else 0.
        demonstration_characters: Maximum characters of each of their texts.
        prompt_format: `lines`, for a model that is trained on them; `json`; `json_schema`, JSON by the model's own structured
            output. Default: `lines` with `instructions` or for a local model; else `json_schema` if the model's profile
            supports it, else `json`.
        instructions: The system prompt, "" for none. Default: the newest of `dreamgym_lg/prompts` in this format.
        hosted: Limits, budget and stored answers of a hosted model. Default: `Hosted()` for a model that takes a key.
        retries: Maximum further tries after an unreadable answer; each tells the model the reason.
        version: Default: names of model and prompt, e.g. `gpt-5.4-mini/experience-json-2`.

    Raises `ConfigurationError` for an object that is no chat model, an unknown format, and demonstrations without a buffer;
    what `load_chat_model` raises.
    """

    name = "model"

    def __init__(
        self,
        model: BaseChatModel | str | None,
        *,
        replay_buffer: ReplayBuffer | None = None,
        demonstrations: int | None = None,
        demonstration_characters: int = 1000,
        prompt_format: PromptFormatName | None = None,
        instructions: str | None = None,
        hosted: Hosted | None = None,
        retries: int = 1,
        version: str | None = None,
    ) -> None:
        if demonstrations and replay_buffer is None:
            raise ConfigurationError(f"demonstrations={demonstrations} needs a replay_buffer to retrieve them from")
        self.prompter = Prompter(model, hosted=hosted, replay_buffer=replay_buffer, retries=retries)
        self.replay_buffer = replay_buffer
        self.k = (DEFAULT_DEMONSTRATIONS if replay_buffer is not None else 0) if demonstrations is None else demonstrations
        self.prompt_format = create_format(prompt_format, self.model, instructions, demonstration_characters)
        self.prompter.version = f"{name_of(self.model)}/{self.prompt_format.name}" if version is None else version
        self._demonstrations: dict[tuple[str, str, str], tuple[Step, ...]] = {}

    @property
    def version(self) -> str:
        """Name of the model and the prompt behind the answers."""
        return self.prompter.version

    @property
    def retrieves(self) -> bool:
        """True if the prompts show real transitions."""
        return bool(self.k and self.replay_buffer is not None and self.replay_buffer.count("steps", split="train"))

    async def respond(self, episode: Episode) -> Answer:
        """The model's answer.

        Raises `PredictionFailed` after `retries` unreadable answers, and once the episode exceeds a local model's context; and
        what `Hosted.aask` raises.
        """
        prediction = await self.predict(episode)
        answer = Answer(prediction.observation, prediction.valid, prediction.reasoning)
        if is_tool_task(episode.task):  # a tool never ends an episode; the agent's message does
            return answer
        verdict = Verdict(prediction.reward, prediction.success, prediction.reasoning, prediction.terminated)
        return answer._replace(verdict=verdict)

    async def predict(self, episode: Episode) -> Prediction:
        """As `respond`, but with all fields of the model's answer."""

        def read(text: str) -> Prediction:
            prediction = self.prompt_format.read(text)
            if not prediction.valid:  # an invalid action has no reward and ends nothing
                prediction = prediction._replace(reward=0.0, terminated=False)
            prediction = prediction._replace(success=prediction.terminated and prediction.success)
            if not fits_returns(episode.task, episode.action, Answer(prediction.observation, prediction.valid)):
                schema = json.dumps(returns_schema(episode.task, episode.action), ensure_ascii=False)
                raise PredictionFailed(
                    f"the observation {prediction.observation[:120]!r} is not what the tool returns, JSON of {schema}"
                )
            return prediction

        form = self.prompt_format
        with fail_if_prompt_too_long(episode):
            return await self.prompter.ask(self.messages(episode), read, prompt=form.name, schema=form.schema)

    # --- the prompt -------------------------------------------------------------------------------------------------------

    def messages(self, episode: Episode) -> list[BaseMessage]:
        """The prompt of one step: a conversation that only grows, which suits key-value caches.

        Look-ups that other parts offer (`Episode.lookups`) are shown as the last steps before the action. Later prompts do not
        have them.
        """
        return self.conversation(episode.task, [*episode.steps, *episode.lookups], episode.action)

    def conversation(
        self, task: Task, steps: Sequence[Step], action: str | None = None, *, success: bool = False
    ) -> list[BaseMessage]:
        """Every step as a question with its answer, then the question about `action`.

        Args: `success`, whether the last of the steps completed the task.
        """
        messages: list[BaseMessage] = [SystemMessage(self.prompt_format.head(task))]
        observation, seen, score = first_observation(task), first_observation(task), 0.0
        actions = [*(step.action for step in steps), *([] if action is None else [action])]
        for number, each in enumerate(actions):
            question = Question(each, "" if number else observation, score, self.demonstrations(seen, each, task))
            messages.append(HumanMessage(self.prompt_format.ask(task, question)))
            if number < len(steps):
                step = steps[number]
                completed = success and number == len(steps) - 1
                messages.append(AIMessage(self.prompt_format.answer(in_hindsight(step, success=completed))))
                seen, score = step.next_observation, score + step.reward
        return messages

    def training_conversation(self, trajectory: Trajectory) -> list[BaseMessage]:
        """A recorded episode with the right answers, as training data; empty without a step.

        The last message of a tool agent is left out: it goes to the judge.
        """
        steps = list(trajectory.steps)
        if is_tool_task(trajectory.task) and steps and is_answer(steps[-1].action):
            steps.pop()
        return self.conversation(trajectory.task, steps, success=trajectory.success) if steps else []

    def demonstrations(self, observation: str, action: str, task: Task) -> tuple[Step, ...]:
        """The k real transitions of other tasks nearest to (observation, action)."""
        if not self.k or self.replay_buffer is None:
            return ()
        key = (observation, action, task.id)
        if key not in self._demonstrations:
            near = self.replay_buffer.similar(observation, action, k=self.k, environment=task.environment, exclude_task=task.id)
            add_to_cache(self._demonstrations, key, tuple(near), _MAX_DEMONSTRATIONS)
        return self._demonstrations[key]

    def retrieve(self, trajectories: Sequence[Trajectory]) -> None:
        """Retrieve and cache the demonstrations of all these steps at once."""
        queries = defaultdict[tuple[str, str], dict[tuple[str, str], None]](dict)
        for each in trajectories if self.k else ():
            queries[each.task.id, each.task.environment] |= {(step.observation, step.action): None for step in each.steps}
        for (task_id, environment), pairs in queries.items():
            assert self.replay_buffer is not None
            near = self.replay_buffer.similar_many([*pairs], self.k, environment=environment, exclude_task=task_id)
            self._demonstrations |= {(*pair, task_id): tuple(steps) for pair, steps in zip(pairs, near, strict=True)}
