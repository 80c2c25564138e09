"""Rollouts: many episodes at once, each recorded exactly once."""

import asyncio
import contextvars
import gc
import logging
import random
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

from langsmith.env import get_langchain_env_var_metadata
from langsmith.run_helpers import get_tracing_context, tracing_context
from langsmith.run_trees import get_cached_client

from dreamgym_lg.environment import RULES, CreateEnvironment, EpisodeContext
from dreamgym_lg.errors import AccessBlocked, ConfigurationError, ContextExceeded, EpisodesMissing, RunStopped
from dreamgym_lg.redaction import environment_secrets, without_keys
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Source, Step, Task, Trajectory, is_missing, is_unanswered
from dreamgym_lg.user_code import error_text

logger = logging.getLogger(__name__)

_COLLECTED_AFTER = 50_000
"""New objects between two garbage collections while episodes play. Python's own default is 700 to 2,000."""


class Agent(Protocol):
    """Plays episodes: a compiled graph whose state has `steps` and `success`, or a `SimulatedAgent`."""

    @property
    def astream(self) -> Callable[..., AsyncIterator[Any]]: ...


async def rollout(
    graph: Agent,
    tasks: Sequence[Task],
    create_environment: CreateEnvironment | None = None,
    *,
    source: Source,
    num_generations: int = 1,
    run: str = "",
    iteration: int = 0,
    seed: int = 0,
    concurrency: int = 64,
    attempts: int = 1,
    replay_buffer: ReplayBuffer | None = None,
    policy_version: str = "",
    experience_version: str = "",
    recursion_limit: int = 200,
    on_episode: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Play `num_generations` episodes of every task; results ordered by task, then rollout index.

    Each episode has a context and a sampling seed of its own, and is stored the moment it ends, without secrets of the
    environment (`environment_secrets`). An exception is a trajectory with an `error`. What is stored under the same (run,
    iteration, task, index) is read instead of played, but for those that could not be played (`missing_episodes`).

    Args:
        create_environment: None for an agent that acts on its own real tools.
        source: Who answers: `synthetic` for the experience model, `real` for the real environment.
        run: Name under which the episodes are stored; needed with `replay_buffer`.
        attempts: Rounds at most: failed episodes are played again after all others have ended, but for those that would end the
            same (`AccessBlocked`, `ConfigurationError`, `ContextExceeded`).
        on_episode: Called with each episode as soon as it has been played and stored.

    Raises:
        ConfigurationError: A count below 1, no `run` for the `replay_buffer`, or stored episodes of another source,
            `policy_version` or `experience_version` under the same run and iteration.
        RunStopped: No episode can be played on. Raised once the others have ended; those that were stopped are not stored,
            and played next time.
    """
    _check_counts(num_generations=num_generations, concurrency=concurrency, attempts=attempts)
    keys = {(task.id, index): task for task in tasks for index in range(num_generations)}
    played_by = {"source": source, "policy_version": policy_version, "experience_version": experience_version}
    episodes = {} if replay_buffer is None else _stored(replay_buffer, keys, run, iteration, played_by)
    stored_as = {"run": run, "iteration": iteration, **played_by}
    slots = asyncio.Semaphore(concurrency)
    playing = _Episodes(graph, create_environment, recursion_limit, seed, stored_as, replay_buffer, on_episode, slots)
    with _seldom_collected():
        for _ in range(attempts):
            todo = [key for key in keys if key not in episodes or _may_end_otherwise(episodes[key])]
            episodes |= await _round({key: partial(playing.play, keys[key], key[1]) for key in todo})
    if playing.outgrown:
        logger.warning(
            "%d of %d episodes are cut short, without success, where they outgrew the policy's context; the first: %s",
            *(len(playing.outgrown), len(keys), playing.outgrown[0]),
        )
    return [episodes[task.id, index] for task in tasks for index in range(num_generations)]


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ConfigurationError(f"{name}={count}: at least 1")


def _may_end_otherwise(trajectory: Trajectory) -> bool:
    """True for a failed episode that needs no change before another try."""
    same = (AccessBlocked.__name__, ConfigurationError.__name__, ContextExceeded.__name__)
    return is_missing(trajectory.error) and str(trajectory.error).partition(":")[0] not in same


def missing_episodes(episodes: list[Trajectory]) -> list[Trajectory]:
    """Episodes without which there is no verdict. Those that could not be played, or all if every one failed."""
    failed = [episode for episode in episodes if episode.error]
    return failed if len(failed) == len(episodes) else [episode for episode in failed if is_missing(episode.error)]


def check_played(episodes: list[Trajectory], again: str = "the same command") -> list[Trajectory]:
    """The episodes of an evaluation; `EpisodesMissing` unless a verdict may be based on them (`missing_episodes`).

    Args: `again`, names what the user has to do to have the missing ones played.
    """
    if missing := missing_episodes(episodes):
        causes = "; ".join(dict.fromkeys(str(episode.error) for episode in missing[:3]))
        mend = "Train the experience model longer or on more traces, or take another one"
        if any(is_missing(episode.error) for episode in missing):
            mend = "Mend that"
        elif all(is_unanswered(episode.error) for episode in missing):
            mend = "Take tasks about what the traces looked up, play these in reality (real=True), or add an experience model"
        raise EpisodesMissing(
            f"{len(missing)} of {len(episodes)} episodes (run {missing[0].run!r}) could not be played, and there is no verdict "
            f"without them; the first causes: {causes}. {mend}; then {again} plays only these {len(missing)} again"
        )
    return episodes


def real_steps(episodes: Iterable[Trajectory]) -> int:
    """The number of steps that reached the environment. All but those that its own rules refused."""
    return sum(step.decided_by != RULES for episode in episodes for step in episode.steps)


def _without_secrets(trajectory: Trajectory) -> Trajectory:
    """The trajectory without the environment's keys."""
    if not (keys := environment_secrets()):
        return trajectory
    clean = partial(without_keys, keys=keys)

    def cleaned(step: Step) -> Step:
        texts = (step.observation, step.action, step.next_observation, step.reasoning)
        observation, action, answer, reasoning = map(clean, texts)
        return replace(step, observation=observation, action=action, next_observation=answer, reasoning=reasoning)

    return replace(
        trajectory,
        error=trajectory.error and clean(trajectory.error),
        steps=[cleaned(step) for step in trajectory.steps],
        acts=[act._replace(text=clean(act.text), answer=clean(act.answer)) for act in trajectory.acts],
    )


Key = tuple[str, int]
"""Task id and rollout index."""


def _stored(
    replay_buffer: ReplayBuffer, keys: Collection[Key], run: str, iteration: int, played_by: Mapping[str, str]
) -> dict[Key, Trajectory]:
    """Those of these episodes that were played before and count in a verdict."""
    if not run:
        raise ConfigurationError(
            "run='' with a replay_buffer: episodes are stored under a run's name and read back by it; give run='...', "
            "a name for each policy and purpose"
        )
    stored = replay_buffer.trajectories(run=run, iteration=iteration, segments=True)
    episodes = {key: each for each in stored if (key := (each.task.id, each.rollout_index)) in keys}
    for missing in missing_episodes(list(episodes.values())):
        del episodes[missing.task.id, missing.rollout_index]
    for each in episodes.values():
        for name, own in played_by.items():
            if (before := getattr(each, name)) != own:
                raise ConfigurationError(
                    f"run {run!r} holds episodes of iteration {iteration} with {name}={before!r}, and {name}={own!r} is "
                    "given now; they are not the same episodes: give another run name, or what they were played with"
                )
    return episodes


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Spare the cyclic garbage collector what exists by now."""
    threshold = gc.get_threshold()
    # set by the caller or by another rollout; the threshold first, for the count goes through all that is frozen
    if not 0 < threshold[0] < _COLLECTED_AFTER or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    gc.set_threshold(_COLLECTED_AFTER, *threshold[1:])
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()


async def _round(todo: dict[Key, Callable[[], Any]]) -> dict[Key, Trajectory]:
    """Play these episodes at once, each with nothing of its caller's context.

    If one raises, the others are ended first: nothing plays on behind an error.
    """
    playing: list[asyncio.Task[Any]] = []
    try:
        for play in todo.values():
            playing.append(asyncio.create_task(play(), context=contextvars.Context()))
            await asyncio.sleep(0)  # the first are answered while the last begin
        ended = await asyncio.gather(*playing)
    finally:
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
    for each in ended:
        if isinstance(each, RunStopped):
            raise each
    return dict(zip(todo, ended, strict=True))


@dataclass
class _Episodes:
    """Plays the episodes of one rollout and stores each as it ends."""

    graph: Agent
    create_environment: CreateEnvironment | None
    recursion_limit: int
    seed: int
    stored_as: Mapping[str, Any]
    """Run, iteration, source and versions of all of them."""
    replay_buffer: ReplayBuffer | None
    on_episode: Callable[[Trajectory], None] | None
    slots: asyncio.Semaphore
    outgrown: list[str] = field(default_factory=list)
    """Why episodes were truncated that outgrew the policy's context."""
    tracing: Mapping[str, Any] = field(default_factory=lambda: caller_tracing())

    async def play(self, task: Task, index: int) -> Trajectory | RunStopped:
        name = f"{self.stored_as['iteration']}/{task.id}/{index}"
        recorder = TokenRecorder(seed=random.Random(f"{self.seed}/{name}").getrandbits(40))
        about = {"dreamgym_run": self.stored_as["run"], "dreamgym_task": task.id, "dreamgym_episode": name}
        dreamed = self.stored_as["source"] == "synthetic"
        try:
            async with self.slots:
                with episode_tracing("dream" if dreamed else "real", about, caller=self.tracing):
                    played = await self._act(task, recorder)
        except RunStopped as stopped:
            return stopped
        played |= {"segments": recorder.segments(), **self.stored_as}
        trajectory = _without_secrets(Trajectory(task=task, rollout_index=index, **played))
        if self.replay_buffer is not None:
            self.replay_buffer.add(trajectory)
        if self.on_episode is not None:
            self.on_episode(trajectory)
        return trajectory

    async def _act(self, task: Task, recorder: TokenRecorder) -> dict[str, Any]:
        """Steps, acts, success and error of one episode. Truncated where it outgrows the policy's context."""
        state, cause = dict[str, Any](), None
        try:
            with closing(self.create_environment()) if self.create_environment else nullcontext() as environment, recorder:
                context = EpisodeContext(environment=environment)
                config = {"recursion_limit": self.recursion_limit}
                async for values in self.graph.astream({"task": task}, config, context=context, stream_mode="values"):
                    state = values
        except RunStopped:
            raise
        except Exception as error:
            # a first prompt that is too long is the settings' fault; what outgrows a dream's model is `PredictionFailed`
            if isinstance(error, ContextExceeded) and (steps := list(state.get("steps", ()))):
                state = {**state, "success": False, "steps": [*steps[:-1], replace(steps[-1], truncated=True)]}
                self.outgrown.append(str(error))
            else:
                cause = error_text(error)
        success = cause is None and state.get("success", False)
        return {"steps": state.get("steps", ()), "acts": state.get("acts", ()), "success": success, "error": cause}


# --- tracing -----------------------------------------------------------------------------------------------------------

MARK = "dreamgym"
"""Metadata key of a trace, with the value `dream` or `real`. The tag is `dreamgym: dream` or `dreamgym: real`."""

_CARRIED = ("project_name", "client", "replicas", "tags", "metadata", "enabled")


def caller_tracing() -> dict[str, Any]:
    """The caller's `langsmith.tracing_context`, for episodes that begin in a context of their own."""
    return {name: value for name, value in get_tracing_context().items() if name in _CARRIED and value is not None}


@contextmanager
def episode_tracing(
    kind: Literal["dream", "real"], about: Mapping[str, str] | None = None, *, caller: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Mark every run in the block as of an episode of this kind.

    LangSmith is sent a dreamed one only inside of `tracing_context(enabled=True)`: the environment variable that turns
    production's tracing on is no wish to have thousands of dreams there.

    Args:
        about: Further metadata, such as the episode's task.
        caller: The caller's tracing context. Default: that of the running code.
    """
    context = dict(caller_tracing() if caller is None else caller)
    if kind == "dream":
        context.setdefault("enabled", False)
    if context.get("enabled"):
        # the guard would stop what the first trace of a process does: it asks git, and begins the thread that sends
        get_langchain_env_var_metadata()
        context.setdefault("client", get_cached_client())
    tags, metadata = context.get("tags", []), context.get("metadata", {})
    if MARK not in metadata:  # else an outer block has marked it
        context |= {"tags": [*tags, f"{MARK}: {kind}"], "metadata": {**metadata, MARK: kind, **(about or {})}}
    with tracing_context(**context):
        yield
