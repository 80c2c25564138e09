"""`AgentWorld`: an unmodified LangGraph agent as the world of an experiment."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.actions import tool_schemas
from dreamgym_lg.compiled.compile import compile_world
from dreamgym_lg.compiled.responder import compiled_dream
from dreamgym_lg.curriculum.task_generator import TaskChecks, TaskGenerator
from dreamgym_lg.dream import Dream, Model, Recorded, References, Schemas, User, usual_dream
from dreamgym_lg.dream.trace_index import TraceIndex
from dreamgym_lg.dream.users import model_user
from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError, EnvironmentFailed
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment.agent_arguments import (
    argument_names,
    check_arguments,
    check_dream,
    resolve_isolation,
    to_task_generator,
)
from dreamgym_lg.experiment.experience_models import load_experience_model
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.workspace import logger
from dreamgym_lg.experiment.world import World
from dreamgym_lg.learner import TrainingRow
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import Agent
from dreamgym_lg.simulate import SimulatedAgent
from dreamgym_lg.simulate.agent import ResetReal, Verify
from dreamgym_lg.simulate.doctor import Examination, examine
from dreamgym_lg.simulate.episode import check_context
from dreamgym_lg.simulate.models import check_provider_tools
from dreamgym_lg.simulate.object_graph import simulated_tools
from dreamgym_lg.simulate.replay import RecordedPolicy, Replayed, as_dreamed, replay, warn_of
from dreamgym_lg.simulate.return_types import with_returns
from dreamgym_lg.simulate.wall.agent import WalledAgent, Workers
from dreamgym_lg.simulate.wall.wall import Isolation, promises_of
from dreamgym_lg.types import Split, StepResult, Task, Trajectory
from dreamgym_lg.user_code import load_agent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AgentWorld(World):
    """The world of an unmodified LangGraph agent: tasks, real tools and dream.

    Args:
        graph: The compiled graph of production, or any object with `invoke` that runs one; or a path to it or to a function
            that creates it, `FILE.py:NAME` or `package.module:NAME`. This process loads it too, for tools and real episodes.
        tasks: Every task, of all splits.
        isolation: `process`: dreamed episodes run in worker processes behind a wall of the kernel (`start_walled`); functions
            passed here have to be importable. `guard`: they run in this process, where side effects of Python code are stopped
            and those of native code are not. Default: `process` for a path, `guard` for an object.
        payload: task -> the graph's input. Default: the task's messages, else its instruction as the user's message.
        verify_dream: (task, final state) -> reward, 0 to 1; 1 is a success. Judges dreamed episodes, in which no tool really
            ran. Default: the dream's judges.
        verify_real: The same for real episodes, where it can check the tools' real effects. Real episodes need it.
        reset_real: task -> a context manager, synchronous or asynchronous, in which each real episode is played and verified
            (`ResetReal`). It resets a staging database, for instance.
        writes: Names of the tools that change the world. Default: by the tools' metadata (`find_tool_uses`).
        dream: A `Dream` that plays every dreamed episode, in place of the usual one (`create_dream`); it has its own user.
        user: Replies to the agent in dreamed episodes (`dreamgym_lg.dream.User`). None: its first message ends the episode.
        user_real: The same in real episodes. Default: `user`.
        relative_judge: True to let the experience model compare a group's episodes where recorded successes do not decide
            (`RelativeJudge`). Dreamed validation then says nothing about these tasks.
        task_generator: Writes variations of the tasks with the highest reward variance (`Settings.synthetic_share`): a chat
            model or its name (`ChatTaskGenerator`), or any `TaskGenerator`. `TaskChecks` checks them. Default: no variations.
        options: `route`, `pass_through`, `simulate_nodes`, `allow`, `respond`, `recursion_limit`, `next_payload`,
            `read_message`, `max_turns` and `context` of `simulated`.

    An experiment's folder fixes the names of `payload`, `verify_dream` and the dream's parts: another dream needs another
    folder. `tasks` and the functions' code may change.

    Raises `ConfigurationError` for arguments of a wrong kind, for `process` without a path or on a machine without support for
    it, and if no dreamed episode of the graph could be right: something is not simulated, would fail every episode or, with
    `guard`, could leak (`Examination.refused` says what to do).
    """

    name = "agent"
    settings = Settings(
        real_budget=0,
        policy_tokens=512,
        concurrency=64,
        experience_steps=200,  # of a few hundred traces and their edits, each is seen about once
        batch_size=8,
    )

    def __init__(
        self,
        graph: Any,
        *,
        tasks: Sequence[Task] = (),
        payload: Callable[[Task], Any] | None = None,
        verify_dream: Verify | None = None,
        verify_real: Verify | None = None,
        reset_real: ResetReal | None = None,
        writes: Collection[str] | None = None,
        dream: Dream | None = None,
        user: User | None = None,
        user_real: User | None = None,
        task_generator: TaskGenerator | BaseChatModel | str | None = None,
        isolation: Isolation | None = None,
        relative_judge: bool = False,
        **options: Any,
    ) -> None:
        functions = {"payload": payload, "verify_dream": verify_dream, "verify_real": verify_real, "reset_real": reset_real}
        names = signature(AgentWorld).parameters.keys() - {"graph", "options"}
        check_arguments(tasks, writes, functions, options, names=names)
        check_dream(dream, user, verify_dream)
        self._generator, self._checks = to_task_generator(task_generator), TaskChecks([], evaluation=[])
        self.isolation = resolve_isolation(isolation, graph)
        self.payload, self.options = payload, options
        self._workers: Workers | None = None
        if self.isolation == "process":
            self._workers = Workers(graph, payload=payload, verify=verify_dream, **options)
            self._workers.check()  # import it behind the wall first: an import with side effects is refused there
        self.promises = promises_of(self.isolation)
        self.path = graph if isinstance(graph, str) else None
        self.graph: Any = load_agent(graph) if isinstance(graph, str) else graph
        check_context(self.graph, options.get("context"))
        self.verify_dream, self.verify_real, self.reset_real = verify_dream, verify_real, reset_real
        self.writes, self.dream, self.relative_judge = writes, dream, relative_judge
        self.user = dream.user if dream is not None else user
        self.user_real = user_real or self.user
        self._index: tuple[ReplayBuffer, TraceIndex] | None = None
        self.arguments = argument_names({"payload": payload, "verify_dream": verify_dream}, dream, relative_judge)
        self.judged_by_dream, self.needs_model = verify_dream is None, dream is None
        examined = self.examine()
        self.tools = with_returns(self.graph, tool_schemas(examined.tools))
        self.all_tasks = [self.with_tools(task) for task in tasks]
        self._refuse(examined)

    def _refuse(self, examined: Examination) -> None:
        """Raise `ConfigurationError` for parts that make every dreamed episode wrong under this isolation."""
        allowed = {"stopped"} if self.options.get("allow") else set()  # allow= may permit what is stopped
        if refused := [part for part in examined.refused if part.handling not in allowed]:
            causes = "; ".join(f"{part.kind} {part.name} ({part.handling}): {part.advice}" for part in refused)
            raise ConfigurationError(f"no dreamed episode of this graph can be right: {causes}")

    def examine(self, trajectories: Iterable[Trajectory] | None = None) -> Examination:
        """The graph's parts and how a dream handles each, as `dreamgym doctor` shows it.

        Args: `trajectories`, real ones; they show which tools write, and which tools the graph creates while it runs.
        """
        names = {key: self.options[key] for key in ("pass_through", "simulate_nodes") if key in self.options}
        writes = self.writes if trajectories is not None else None
        return examine(self.graph, **names, writes=writes, trajectories=trajectories or (), isolation=self.isolation)

    def add_traced(self, tasks: Sequence[Task]) -> None:
        """Put tasks of recorded traces before the world's own tasks."""
        self.all_tasks = [*map(self.with_tools, tasks), *self.all_tasks]

    def stored_tasks(self, replay_buffer: ReplayBuffer, split: Split) -> list[Task]:
        goals = {task.id: task.goal for task in replay_buffer.tasks(split=split)}  # `write_goals` may have written them
        return [replace(task, goal=task.goal or goals.get(task.id, {})) for task in self.tasks(split)]

    def with_tools(self, task: Task) -> Task:
        """The task with all the graph's tool schemas, and the goal that its user sets."""
        user = model_user(self.user)
        goal = user.goal(task).side if user is not None and user.has_own_goal else task.goal
        return replace(task, tools=self.tools, goal=goal)

    def tasks(self, split: Split, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        return [task for task in self.all_tasks if task.split == split][:limit]

    def create_environment(self) -> Environment:
        return _OwnTools()

    def create_dream(self, model: Model) -> Dream:
        """`dream=`, or else the usual dream (`usual_dream`).

        Calls are answered by tools' schemas, recorded answers, then the experience model. The writing calls of recorded
        successes judge, then a language model.
        """
        index = self.index(model.replay_buffer) if model.replay_buffer is not None else None
        dream = self.dream or usual_dream(model, index, user=self.user, relative=self.relative_judge)
        if dream.user is None or self.judged_by_dream:
            return dream
        return Dream(dream.responders, dream.user)  # `verify_dream` replaces its judges

    def index(self, replay_buffer: ReplayBuffer) -> TraceIndex:
        """The index of this buffer's real traces, with the graph's own tools."""
        if self._index is None or self._index[0] is not replay_buffer:
            tools, passed = simulated_tools(self.graph, self.options.get("pass_through", ()))
            self._index = replay_buffer, TraceIndex(replay_buffer, tools=tools, writes=self.writes, pass_through=passed)
        return self._index[1]

    def writing_tools(self, replay_buffer: ReplayBuffer) -> Collection[str]:
        """Names of the tools that change the world."""
        index = self.index(replay_buffer)
        index.refresh()
        return frozenset(filter(index.writes, index.uses))

    def as_dreamed(self, recorded: Sequence[Trajectory]) -> list[Trajectory]:
        """Recorded episodes as the graph replays them, with its tools and the environment's steps alone."""
        agent = self.agent(RecordedPolicy(), real=False)

        async def replay_all() -> list[Replayed]:
            return [await replay(agent, trajectory) for trajectory in recorded]

        warn_of(replayed := run_lasting(replay_all()))
        all_tools = max((each.tools for each in replayed), key=len, default=())
        completed = (each if each.misfit is None else each._replace(tools=all_tools) for each in replayed)
        return [as_dreamed(trajectory, each) for trajectory, each in zip(recorded, completed, strict=True)]

    def policy_rows(
        self, recorded: Sequence[Trajectory], tokenizer: "PreTrainedTokenizerBase", **options: Any
    ) -> list[TrainingRow]:
        """The tokens that rollouts would record if the policy acted as in these episodes.

        Episodes that do not replay are left out with a warning. Raises `ConfigurationError` if none replays.
        """
        from dreamgym_lg.integrations.trl.rows import replayed_rows

        return replayed_rows(partial(self.agent, real=False), recorded, tokenizer, **options)

    def task_generator(self, tasks: Sequence[Task], replay_buffer: ReplayBuffer) -> TaskGenerator | None:
        if self._generator is not None:
            environments = {task.environment for task in tasks}
            stored = [task for task in replay_buffer.tasks() if task.environment in environments]
            offline = replay_buffer.trajectories(source="offline", split="train", errors=False)
            self._checks = TaskChecks(
                [*tasks, *(task for task in stored if task.origin == "synthetic")],
                evaluation=[task for task in stored if task.split != "train"],
                trajectories=[each for each in offline if each.task.environment in environments],
                judged=self._is_judged(replay_buffer),
            )
        return self._generator

    def _is_judged(self, replay_buffer: ReplayBuffer) -> Callable[[Task], bool]:
        """A function that tells if `verify_dream` or a judge of the dream decides a task."""
        if not self.judged_by_dream:
            return lambda task: True
        if self.dream is not None:
            return self.dream.decides
        references = References(self.index(replay_buffer))
        return lambda task: bool(task.rubric.strip()) or references.decides(task)  # a model judges by the rubric

    def check_task(self, task: Task) -> str | None:
        return self._checks(task)

    @property
    def source(self) -> Mapping[str, object] | None:
        """The agent's path, with `route` and `pass_through`; None for an object."""
        route = self.options.get("route")
        if self.path is None:
            return None
        if callable(route):
            logger.warning(
                "route= is a function, which no folder can hold: the export serves the policy alone; give names of nodes"
            )
            return None
        kept = {"route": None if route is None else sorted(route), "pass_through": sorted(self.options.get("pass_through", ()))}
        return {"path": self.path, **kept}

    def agent(self, policy: BaseChatModel, *, real: bool) -> Agent:
        """The graph with `policy` as its model. It acts in the dream or, with `real`, on its own tools."""
        if not real:
            check_provider_tools(policy)
        if self._workers is not None and not real:
            return WalledAgent(self._workers, policy)
        return SimulatedAgent(
            self.graph,
            policy,
            payload=self.payload,
            verify=self.verify_real if real else self.verify_dream,
            real=real,
            reset_real=self.reset_real if real else None,
            user=self.user_real if real else None,
            **self.options,
        )


def dream_of_traces(
    agent: str,
    replay_buffer: ReplayBuffer,
    folder: str | Path,
    *,
    experience_model: Model | BaseChatModel | str | None = None,
    say: Callable[[str], None] = print,
    **options: Any,
) -> Dream:
    """A dream of recorded answers, code compiled from them, and an experience model if given.

    Args: `agent` and `options`, as for `AgentWorld`, such as the `user` of conversations; `folder`, of the compiled code, which
        is written anew only if traces, tools or compiler change; `experience_model`, answers and judges the rest; `say`, called
        with lines on who answers.
    """
    world = AgentWorld(agent, **options)
    model = None if experience_model is None else load_experience_model(experience_model, replay_buffer)
    index = world.index(replay_buffer)
    writes = None if world.writes is None else world.writing_tools(replay_buffer)
    try:
        tools = compile_world(replay_buffer, folder, tools=index.tools, writes=writes, recompile=False, say=say)
    except ConfigurationError as error:
        answering = "recorded answers alone answer" if model is None else "recorded answers and the experience model answer"
        say(f"{answering}: nothing could be compiled from the traces ({error})")
        if model is not None:
            return usual_dream(model, index, user=world.user)
        references = References(index, conversations=world.user is not None)
        return Dream([Schemas(index.tools), Recorded(index)], world.user, [references])
    admitted = [each.tool for each in tools if each.admitted]
    names = ", ".join(admitted) or "none replays exactly"
    others = "recorded answers" if model is None else "recorded answers and the experience model"
    say(f"code compiled from the traces answers {len(admitted)} of {len(tools)} tools ({names}); {others} the others")
    for each in tools:
        if each.refusal:
            say(f"    {each.tool} is not among them: {each.refusal} ({Path(folder) / 'REPLAY.md'})")
    return compiled_dream(folder, index, user=world.user, model=model)


class _OwnTools(Environment):
    """The real environment of an agent, which is never stepped. The agent acts on its own tools."""

    def reset(self, task: Task) -> str:
        return task.instruction

    def step(self, action: str) -> StepResult:
        raise EnvironmentFailed(
            "an agent's real environment is its own tools, which only the agent calls: evaluate(real=True) plays it there"
        )
