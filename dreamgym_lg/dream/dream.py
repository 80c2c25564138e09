"""`Dream`, made of responders, a user and judges, and the environment that runs them."""

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, TypeVar

from dreamgym_lg.actions import is_answer, parse_action
from dreamgym_lg.dream.parts import Answer, DecidesTasks, Episode, Judge, Responder, SupportsLookups, User, Verdict
from dreamgym_lg.dream.recorded import Recorded
from dreamgym_lg.dream.schemas import Schemas, fits_returns, sets_state
from dreamgym_lg.dream.trace_index import TraceIndex
from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError, DreamGymError, EnvironmentFailed, Unanswered
from dreamgym_lg.event_loop import wait_in_loop
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.tasks import first_observation, is_tool_task, with_tools
from dreamgym_lg.types import Step, StepResult, Task
from dreamgym_lg.user_code import error_text

T = TypeVar("T")


class Dream:
    """A simulated environment made of parts. One object serves any number of concurrent episodes.

    Args:
        responders: Asked in order for the answer to a tool call, or to any action of a text agent; the first answer counts. An
            answer that does not fit the tool's return schema is skipped unless it is recorded; for a tool that returns a
            `Command`, a recorded one too.
        user: Replies to a tool agent's messages. None: the first message ends the episode.
        judges: Asked in order for the outcome, at the end of a tool agent's episode and after each action of a text agent.

    Raises `ConfigurationError` for a part without a name or its method.
    """

    def __init__(
        self, responders: Sequence[Responder], user: User | None = None, judges: Sequence[Judge] = (), *, version: str = ""
    ) -> None:
        self.responders, self.user, self.judges = tuple(responders), user, tuple(judges)
        for method, parts in (("respond", self.responders), ("reply", (user,) if user else ()), ("judge", self.judges)):
            for part in parts:
                if not callable(getattr(part, method, None)) or not isinstance(getattr(part, "name", None), str):
                    raise ConfigurationError(f"{part!r} has no name or no method {method}(): see dreamgym_lg.dream.parts")
        indexes = (index for part in self._parts if isinstance(index := getattr(part, "index", None), TraceIndex))
        self.pass_through = frozenset[str]().union(*(index.pass_through for index in indexes))
        """Names of tools that really run, as the parts' `TraceIndex` has them."""
        self._version = version

    @property
    def _parts(self) -> tuple[Responder | User | Judge, ...]:
        return (*self.responders, *([self.user] if self.user is not None else []), *self.judges)

    @property
    def version(self) -> str:
        """Names of the models and prompts behind the dream, recorded with every episode."""
        return self._version or "+".join(dict.fromkeys(filter(None, self._of_parts("version")))) or "dream"

    @property
    def versions(self) -> tuple[str, ...] | None:
        """The versions and digests of all parts. None if a part names no version (`dream.parts`)."""
        versions = [getattr(part, "version", None) for part in self._parts]
        if None in versions:
            return None
        return tuple(f"{version}{getattr(part, 'digest', '')}" for version, part in zip(versions, self._parts, strict=True))

    def create_environment(self) -> "DreamEnvironment":
        """An environment for one episode."""
        return DreamEnvironment(self)

    def resume(self, task: Task, steps: Sequence[Step] = (), *, prompt: str = "") -> "DreamEnvironment":
        """An episode that continues after recorded steps, without the task's own traces.

        Args: `prompt`, the agent's system prompt.
        """
        environment = DreamEnvironment(self, own_traces=False)
        environment.reset(task)
        environment.show_prompt(prompt)
        schemas = [part for part in self.responders if isinstance(part, Schemas)]
        for step in steps:
            refused = not step.valid and any(part.respond(Episode(task=task, action=step.action)) for part in schemas)
            environment.steps.append(replace(step, decided_by=Schemas.name) if refused else step)
        return environment

    def decides_by_traces(self, task: Task) -> bool:
        """True if recorded traces decide every outcome of the task, before any language model (`DecidesTasks`)."""
        before_models = takewhile(lambda judge: getattr(judge, "model", None) is None, self.judges)
        return any(isinstance(judge, DecidesTasks) and judge.decides(task) for judge in before_models)

    def decides(self, task: Task) -> bool:
        """True if some judge decides the task. A judge that cannot tell beforehand (`DecidesTasks`) counts as one."""
        return any(not isinstance(judge, DecidesTasks) or judge.decides(task) for judge in self.judges)

    def judged_by_traces(self) -> "Dream":
        """This dream without the judges that are language models."""
        judges = [judge for judge in self.judges if getattr(judge, "model", None) is None]
        return Dream(self.responders, self.user, judges, version=self.version)

    @property
    def language_models(self) -> list[Any]:
        """The chat models behind the parts, each once."""
        return self._of_parts("model")

    @property
    def hosted(self) -> list[Hosted]:
        """Limits and budgets of the parts that ask hosted models, each once."""
        return self._of_parts("hosted")

    def _of_parts(self, name: str) -> list[Any]:
        values = (getattr(part, name, None) for part in self._parts)
        return list({id(value): value for value in values if value is not None}.values())

    async def respond(self, episode: Episode) -> tuple[Answer, str]:
        """The first accepted answer to the action, and its responder's name. Raises `Unanswered` without one."""
        for responder in self.responders:
            answer = await ask(responder, "respond", Answer, episode)
            if answer is not None and self.accepts(responder, episode, answer):
                return answer, responder.name
            episode = await self.with_lookups(responder, episode)
        names = ", ".join(responder.name for responder in self.responders) or "it has none"
        is_update = sets_state(episode.task, episode.action)
        hint = "; recordings lack the state that this tool sets: an experience model has to answer it" if is_update else ""
        raise Unanswered(f"no responder of the dream ({names}) answers {episode.action[:200]!r}{hint}")

    async def with_lookups(self, responder: Responder, episode: Episode) -> Episode:
        """The episode for later responders, with this one's look-ups added (`SupportsLookups`)."""
        if not isinstance(responder, SupportsLookups) or responder is self.responders[-1]:
            return episode
        lookups = await ask(responder, "lookups", list, episode) or []
        return replace(episode, lookups=[*episode.lookups, *lookups])

    def accepts(self, responder: Responder, episode: Episode, answer: Answer) -> bool:
        """True if the answer fits the tool's return schema.

        A recorded answer counts even if it does not fit (an error text, say), except for a tool that sets state.
        """
        is_real = isinstance(responder, Recorded) and not sets_state(episode.task, episode.action)
        return is_real or fits_returns(episode.task, episode.action, answer)

    async def judge(self, episode: Episode, answer: Answer | None = None) -> tuple[Verdict | None, str]:
        """The first final verdict, else the first one, and its judge's name. None and "" without a verdict."""
        first: tuple[Verdict | None, str] = None, ""
        for judge in self.judges:
            if (verdict := await ask(judge, "judge", Verdict, episode, answer)) is None:
                continue
            if verdict.final:
                return verdict, judge.name
            first = first if first[0] else (verdict, judge.name)
        return first


class DreamEnvironment(Environment):
    """One episode of a `Dream`; nothing real is touched.

    Args: `own_traces`, False if traces of the same task must neither answer nor judge (`Dream.resume`).
    """

    def __init__(self, dream: Dream, *, own_traces: bool = True) -> None:
        self.dream, self.own_traces, self.has_user = dream, own_traces, dream.user is not None
        self.steps: list[Step] = []
        self._task: Task | None = None
        self._prompt = ""

    def reset(self, task: Task) -> str:
        if not first_observation(task):
            raise ConfigurationError(f"task {task.id!r} has no observation and no instruction: a dream of it cannot begin")
        self._task, self.steps, self._prompt = task, [], ""
        return first_observation(task)

    async def areset(self, task: Task) -> str:
        return self.reset(task)

    def show_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._task = with_tools(self._playing(), tools)

    def show_prompt(self, text: str) -> None:
        self._prompt = text

    def step(self, action: str) -> StepResult:
        """As `astep`; all synchronous episodes share one event loop, which keeps the clients' connections."""
        return wait_in_loop("dreamgym-dream", self.astep(action))

    async def astep(self, action: str) -> StepResult:
        episode = self.episode(action)
        task = episode.task
        if is_tool_task(task) and is_answer(action):
            return await self._answer_message(episode)
        answer, decided_by = await self.dream.respond(episode)
        verdict, judged_by = (None, "") if is_tool_task(task) else await self.dream.judge(episode, answer)
        if verdict is None and answer.outcome is not None and not is_tool_task(task):
            verdict, judged_by = answer.outcome, decided_by
        return self._advance(episode, answer, verdict, decided_by, judged_by)

    def episode(self, action: str) -> Episode:
        """The episode up to this action, as its parts see it."""
        # without refused calls: in a graph LangChain refuses them, and they never reach an environment
        steps = tuple(step for step in self.steps if step.decided_by != Schemas.name)
        return Episode(
            task=self._playing(),
            steps=steps,
            action=action,
            prompt=self._prompt,
            own_traces=self.own_traces,
            pass_through=self.dream.pass_through,
        )

    async def _answer_message(self, episode: Episode) -> StepResult:
        """Answer a tool agent's message: the user replies, else the judges decide. An empty message ends the episode."""
        user = self.dream.user if parse_action(episode.action) else None
        if user is not None and (reply := await ask(user, "reply", str, episode)) is not None:
            return self._advance(episode, Answer(reply), None, user.name, "")
        verdict, judged_by = await self.dream.judge(episode)
        if verdict is None and (self.dream.judges or self.dream.user is None):
            raise ConfigurationError(
                f"no judge of the dream decides the outcome of task {episode.task.id!r}: add one that does, such as ModelJudge"
            )
        verdict = verdict or Verdict(0.0, False)  # a dream with a user and no judge: the caller verifies the episode
        return self._advance(episode, Answer("", reasoning=verdict.reason), verdict._replace(terminated=True), "", judged_by)

    def _advance(
        self, episode: Episode, answer: Answer, verdict: Verdict | None, decided_by: str, judged_by: str
    ) -> StepResult:
        verdict = verdict or Verdict(0.0, False, terminated=False)
        self.steps.append(
            Step(
                observation=self.steps[-1].next_observation if self.steps else episode.observation,
                action=episode.action,
                next_observation=answer.observation,
                reward=verdict.reward,
                terminated=verdict.terminated,
                valid=answer.valid,
                reasoning=answer.reasoning,
                decided_by=decided_by,
                judged_by=judged_by,
            )
        )
        if verdict.terminated:
            self._task = None
        info = {"success": verdict.terminated and verdict.success, "valid": answer.valid, "reasoning": answer.reasoning}
        info |= {"decided_by": decided_by, "judged_by": judged_by}
        return StepResult(answer.observation, verdict.reward, verdict.terminated, False, info)

    def _playing(self) -> Task:
        if self._task is None:
            raise RuntimeError("step before reset, or after the episode's end: call reset(task)")
        return self._task


async def ask(part: Responder | User | Judge, method: str, kind: type[T], *arguments: object) -> T | None:
    """The result of a part's method, which may be asynchronous.

    Raises `ConfigurationError` for a result of another type. Errors that are not of this library become `EnvironmentFailed`.
    """
    place = f"{method}() of the dream's {part.name!r} ({type(part).__name__})"
    try:
        result = await awaited(getattr(part, method)(*arguments))
    except DreamGymError:
        raise
    except Exception as error:
        raise EnvironmentFailed(f"{place} raised {error_text(error)}") from error
    if result is None or isinstance(result, kind):
        return result
    raise ConfigurationError(f"{place} returned {result!r}: let it return {kind.__name__} or None")


async def awaited(value: "T | Awaitable[T]") -> T:
    """The value, awaited if it is awaitable."""
    return await value if inspect.isawaitable(value) else value
