"""Judges of a tool agent's episode: the user's own check, and a language model."""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from pydantic import BaseModel, StrictBool, StrictStr

from dreamgym_lg.actions import is_answer
from dreamgym_lg.dream.dream import Dream, awaited
from dreamgym_lg.dream.facts import message_text
from dreamgym_lg.dream.model import Model
from dreamgym_lg.dream.parts import Answer, Episode, Verdict
from dreamgym_lg.dream.prompter import ChatModelPart, Prompter, fail_if_prompt_too_long
from dreamgym_lg.dream.prompts import LineFormat, default_format, encoded, load_prompt, on_one_line, prompt_name, read_form
from dreamgym_lg.dream.recorded import References
from dreamgym_lg.dream.trace_index import Success, TraceIndex
from dreamgym_lg.errors import ConfigurationError, PredictionFailed
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.tasks import first_observation, is_tool_task, rules
from dreamgym_lg.types import Step, Task, Trajectory

LINE_PROMPT, JSON_PROMPT = "judge-lines-1", "judge-json-1"

RUBRIC = (
    "it is a success only if the calls made so far really did everything that the task asks for, with the right arguments, "
    "and the message says nothing that they do not show."
)
"""The rule for success where the task brings none of its own (`Task.rubric`)."""


class _Answer(BaseModel, extra="forbid", title="verdict"):
    """The verdict on an agent's episode."""

    reason: StrictStr
    success: StrictBool


class Verify:
    """The user's own check as a judge.

    Args: `check`, (task, steps) -> the reward, 0 to 1, where 1 is a success, or None if it cannot decide. May be asynchronous.
    The last step's action is the message that ended the episode.

    `judge` raises `ConfigurationError` for a reward outside 0 to 1.
    """

    name = "verify"
    version: str | None = None
    """Set it, and change it with the check, to reuse measurements of the check (`dream.parts`)."""

    def __init__(self, check: Callable[[Task, Sequence[Step]], "float | bool | None | Awaitable[float | bool | None]"]) -> None:
        self._check = check

    async def judge(self, episode: Episode, answer: Answer | None) -> Verdict | None:
        if answer is not None:
            return None
        last = Step(observation=episode.observation, action=episode.action, next_observation="", terminated=True)
        result = await awaited(self._check(episode.task, [*episode.steps, last]))
        if result is None:
            return None
        if not 0 <= (reward := float(result)) <= 1:
            raise ConfigurationError(f"the check gave {reward:g} for task {episode.task.id!r}; a reward is 0 to 1, 1 a success")
        return Verdict(reward, reward >= 1, "the user's own check")


class ModelJudge(ChatModelPart):
    """A language model that judges a tool agent's whole episode when it ends.

    It reads the task, its rubric, every step, the last message and, if there is one, a recorded success of the same task as
    reference. Text agents are judged by the experience model's own answers (`Answer.verdict`).

    Args:
        model: A chat model that answers at temperature 0, its name, or a `Model` whose chat model and limits it shares.
        references: A replay buffer with recorded successes, or the `References` of the same dream. Default: a `Model`'s buffer.
        policy: Rules for the agent, shown to the judge. Default: for a task without a rubric, the agent's system prompt
            (`Task.messages`; in JSON prompts also the one that the agent sends).
        hosted, retries: As for `Model`. A `Model` passed as `model` has its own.
    """

    name = "model"

    def __init__(
        self,
        model: BaseChatModel | Model | str,
        *,
        references: ReplayBuffer | TraceIndex | References | None = None,
        policy: str = "",
        hosted: Hosted | None = None,
        retries: int = 1,
    ) -> None:
        shared = model if isinstance(model, Model) else None
        source = references if references is not None else shared.replay_buffer if shared else None
        if isinstance(model, Model):
            self.prompter = model.prompter
        else:
            buffer = source if isinstance(source, ReplayBuffer) else None
            self.prompter = Prompter(model, hosted=hosted, replay_buffer=buffer, retries=retries)
        self._references = source if source is None or isinstance(source, References) else References(source)
        form = default_format(self.model)
        self._lines = isinstance(shared.prompt_format, LineFormat) if shared else form == "lines"
        self._schema = _Answer.model_json_schema() if form == "json_schema" and not self._lines else None
        default_prompt = LINE_PROMPT if self._lines else JSON_PROMPT
        self.policy, self.instructions = policy, load_prompt(default_prompt)
        self.prompt = prompt_name(default_prompt, f"{self.instructions}\n{policy}" if policy else None)
        self._names_prompt = shared is None or bool(policy)

    @property
    def version(self) -> str:
        """Name of the model and the prompt behind the verdicts."""
        return f"{self.prompter.version}/{self.prompt}" if self._names_prompt else self.prompter.version

    async def judge(self, episode: Episode, answer: Answer | None) -> Verdict | None:
        """The verdict; None for a text agent. Raises as `Model.respond`."""
        if answer is not None or not is_tool_task(episode.task):
            return None
        with fail_if_prompt_too_long(episode):
            return await self.prompter.ask(self.messages(episode), self.read, prompt=self.prompt, schema=self._schema)

    def messages(self, episode: Episode) -> list[BaseMessage]:
        """The prompt: the whole episode, with its last message."""
        references = self._references.of_episode(episode) if self._references else []
        reference = references[0] if references else None
        return self._in_lines(episode, reference) if self._lines else self._in_json(episode, reference)

    def _rules(self, task: Task, prompt: str = "") -> str:
        return self.policy or ("" if task.rubric else prompt or rules(task))

    def _in_json(self, episode: Episode, reference: Success | None) -> list[BaseMessage]:
        content: dict[str, Any] = {"task": first_observation(episode.task)}
        if policy := self._rules(episode.task, episode.prompt):
            content["rules"] = policy
        content["success"] = episode.task.rubric or RUBRIC
        if reference is not None:
            content["reference"] = {"calls": list(reference.calls), "message": message_text(reference.message)}
        steps = [{"action": s.action, "answer": s.next_observation, "valid": s.valid} for s in episode.steps]
        content |= {"steps": steps, "message": message_text(episode.action)}
        return [SystemMessage(self.instructions), HumanMessage(encoded(content))]

    def _in_lines(self, episode: Episode, reference: Success | None) -> list[BaseMessage]:
        head = [self.instructions, self._rules(episode.task), episode.task.rubric or RUBRIC]
        lines = [on_one_line(first_observation(episode.task))]
        if reference is not None:
            lines += ["a recorded success:", *map(on_one_line, (*reference.calls, reference.message)), "this episode:"]
        for step in episode.steps:
            lines += [on_one_line(step.action), on_one_line(step.next_observation)]
        lines.append(on_one_line(episode.action))
        return [SystemMessage("\n".join(filter(None, head))), HumanMessage("\n".join(lines))]

    def answer(self, verdict: Verdict) -> AIMessage:
        """A verdict as the model should write it, for its training."""
        if self._lines:
            reason = " ".join(verdict.reason.split()) or "judged by its outcome"
            return AIMessage(f"{reason}\n{'success' if verdict.success else 'failure'}")
        return AIMessage(encoded({"reason": verdict.reason, "success": verdict.success}))

    def read(self, text: str) -> Verdict:
        """The verdict in an answer. Raises `PredictionFailed` saying what is wrong with the text."""
        if self._lines:
            match = re.fullmatch(r"(?P<reason>\S.*)\n(?P<status>success|failure)", text.strip(), re.DOTALL)
            if match is None:
                raise PredictionFailed(f"the judge answered {text[:200]!r}; expected its reasoning, then success or failure")
            return Verdict(float(match["status"] == "success"), match["status"] == "success", match["reason"])
        answer = read_form(text, _Answer)
        return Verdict(float(answer.success), answer.success, answer.reason)


async def judge_conversations(dream: Dream, trajectory: Trajectory) -> list[list[BaseMessage]]:
    """Training conversations for the `ModelJudge` of `dream`: a recorded episode with the right verdict.

    There are two if the prompts with and without the traces of its task differ. One is left out if an earlier judge decides
    it. None without a `ModelJudge`, and for an episode that does not end with a tool agent's message.
    """
    place = next((number for number, judge in enumerate(dream.judges) if isinstance(judge, ModelJudge)), None)
    if place is None or not ends_with_message(trajectory):
        return []
    judge, earlier = dream.judges[place], Dream((), judges=dream.judges[:place])
    assert isinstance(judge, ModelJudge)
    *steps, last = trajectory.steps
    outcome = "it completes the task" if trajectory.success else "it fails the task"
    verdict = Verdict(float(trajectory.success), trajectory.success, last.reasoning or outcome)
    prompts = dict[tuple[str, ...], list[BaseMessage]]()
    for own_traces in (True, False):
        episode = Episode(
            task=trajectory.task, steps=steps, action=last.action, prompt=trajectory.prompt, own_traces=own_traces
        )
        if (decided := (await earlier.judge(episode))[0]) is None or not decided.final:
            messages = judge.messages(episode)
            prompts[tuple(message.text for message in messages)] = messages
    return [[*messages, judge.answer(verdict)] for messages in prompts.values()]


def ends_with_message(trajectory: Trajectory) -> bool:
    """True for a tool agent's episode with a known outcome that ends with a message."""
    is_judged = is_tool_task(trajectory.task) and bool(trajectory.steps) and trajectory.has_outcome
    return is_judged and is_answer(trajectory.steps[-1].action)
