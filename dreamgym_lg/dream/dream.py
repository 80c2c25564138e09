"""`Dream`: responders, a user and judges; and the one loop that steps them."""

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, TypeVar

from dreamgym_lg.actions import is_answer, parse_action
from dreamgym_lg.dream.parts import Answer, DecidesTasks, Episode, Judge, OffersLookups, Responder, User, Verdict
from dreamgym_lg.dream.recorded import Recorded
from dreamgym_lg.dream.schemas import Schemas, fits_returns, sets_state
from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError, DreamGymError, EnvironmentFailed, Unanswered
from dreamgym_lg.event_loop import wait_in_loop
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.tasks import first_observation, is_tool_task, with_tools
from dreamgym_lg.types import Step, StepResult, Task
from dreamgym_lg.user_code import error_text

T = TypeVar("T")


class Dream:
    """An environment made of parts; one object serves any number of episodes at once.

    Args:
        responders: The first that knows the answer to a tool call, or to any action of a text agent, gives it. An answer that
            misfits the return schema is skipped, unless recorded. Recordings are skipped for tools that return a `Command`.
        user: Replies to a tool agent's messages. None: the first message ends the episode.
        judges: The first that knows the outcome decides it, at the end of a tool agent's episode and after each action of a
            text agent.

    Raises `ConfigurationError` for a part without its method.
    """

    def __init__(
        self, responders: Sequence[Responder], user: User | None = None, judges: Sequence[Judge] = (), *, version: str = ""
    ) -> None:
        self.responders, self.user, self.judges = tuple(responders), user, tuple(judges)
        for method, parts in (("respond", self.responders), ("reply", (user,) if user else ()), ("judge", self.judges)):
            for part in parts:
                if not callable(getattr(part, method, None)) or not isinstance(getattr(part, "name", None), str):
                    raise ConfigurationError(f"{part!r} has no name or no method {method}(): see dreamgym_lg.dream.parts")
        self._version = version

    @property
    def version(self) -> str:
        """Names the models and prompts behind the dream; recorded with every dreamed episode."""
        return self._version or "+".join(dict.fromkeys(filter(None, self._of_parts("version")))) or "dream"

    @property
    def versions(self) -> tuple[str, ...] | None:
        """The versions and digests of all parts. None where a part names no version (`dream.parts`)."""
        parts = (*self.responders, *((self.user,) if self.user is not None else ()), *self.judges)
        if any(getattr(part, "version", None) is None for part in parts):
            return None
        return tuple(f"{part.version}{getattr(part, 'digest', '')}" for part in parts)

    def create_environment(self) -> "DreamEnvironment":
        """An environment for one episode."""
        return DreamEnvironment(self)

    def resume(self, task: Task, steps: Sequence[Step] = (), *, prompt: str = "") -> "DreamEnvironment":
        """An episode behind recorded steps, as of a task without own traces. Args: `prompt`, the agent's system prompt."""
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
        """True if some judge decides the task. One that does not say so beforehand (`DecidesTasks`) is taken to."""
        return any(not isinstance(judge, DecidesTasks) or judge.decides(task) for judge in self.judges)

    def judged_by_traces(self) -> "Dream":
        """This dream with those judges alone that ask no language model."""
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
        values = (getattr(part, name, None) for part in (*self.responders, self.user, *self.judges))
        return list({id(value): value for value in values if value is not None}.values())

    async def respond(self, episode: Episode) -> tuple[Answer, str]:
        """The first answer to the action, and the name of its responder. Raises `Unanswered` without one."""
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
        """The episode as later responders see it, with what this one knows (`OffersLookups`)."""
        if not isinstance(responder, OffersLookups) or responder is self.responders[-1]:
            return episode
        lookups = await ask(responder, "lookups", list, episode) or []
        return replace(episode, lookups=[*episode.lookups, *lookups])

    def accepts(self, responder: Responder, episode: Episode, answer: Answer) -> bool:
        """True unless the next responder is asked: the answer misfits what the tool returns.

        What a tool really answered, an error text perhaps, is its answer whatever it promises.
        """
        is_real = isinstance(responder, Recorded) and not sets_state(episode.task, episode.action)
        return is_real or fits_returns(episode.task, episode.action, answer)

    async def judge(self, episode: Episode, answer: Answer | None = None) -> tuple[Verdict | None, str]:
        """The first final verdict, else the first one, and its judge's name. None and "" without one."""
        open_verdict: tuple[Verdict | None, str] = None, ""
        for judge in self.judges:
            if (verdict := await ask(judge, "judge", Verdict, episode, answer)) is None:
                continue
            if verdict.final:
                return verdict, judge.name
            open_verdict = open_verdict if open_verdict[0] else (verdict, judge.name)
        return open_verdict


class DreamEnvironment(Environment):
    """One episode of a `Dream`; nothing real is touched.

    Args: `own_traces`, False to leave out what traces of the episode's own task know (`Dream.resume`).
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
            return await self._hear(episode)
        answer, decided_by = await self.dream.respond(episode)
        verdict, judged_by = (None, "") if is_tool_task(task) else await self.dream.judge(episode, answer)
        if verdict is None and answer.outcome is not None and not is_tool_task(task):
            verdict, judged_by = answer.outcome, decided_by
        return self._advance(episode, answer, verdict, decided_by, judged_by)

    def episode(self, action: str) -> Episode:
        """The episode up to this action, as the parts see it."""
        # in a graph, LangChain refuses a call before any environment is asked: no part sees it
        steps = tuple(step for step in self.steps if step.decided_by != Schemas.name)
        return Episode(task=self._playing(), steps=steps, action=action, prompt=self._prompt, own_traces=self.own_traces)

    async def _hear(self, episode: Episode) -> StepResult:
        """A message of a tool agent: the user replies, else the judges decide. No user hears an empty one: it ends."""
        user = self.dream.user if parse_action(episode.action) else None
        if user is not None and (reply := await ask(user, "reply", str, episode)) is not None:
            return self._advance(episode, Answer(reply), None, user.name, "")
        verdict, judged_by = await self.dream.judge(episode)
        if verdict is None and (self.dream.judges or self.dream.user is None):
            raise ConfigurationError(
                f"no judge of the dream decides the outcome of task {episode.task.id!r}: add one that does, such as ModelJudge"
            )
        verdict = verdict or Verdict(0.0, False)  # whoever gave a user and no judge verifies the episode
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

    Raises `ConfigurationError` for a result of another kind, and `EnvironmentFailed` for an error that is not this library's.
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
    """A part's result; parts may be synchronous or asynchronous."""
    return await value if inspect.isawaitable(value) else value
