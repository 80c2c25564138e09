"""`World`: the tasks and the real environment of an experiment.

Installed ones are found by the entry-point group `dreamgym_lg.worlds`, so that other packages can add theirs.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.curriculum.task_generator import TaskGenerator
from dreamgym_lg.dream import Dream, Model, ModelJudge, User
from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.learner import TrainingRow
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import Agent
from dreamgym_lg.types import Split, Task, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


GROUP = "dreamgym_lg.worlds"
"""Entry-point group of installed worlds. An entry point is called without arguments, or with a stored `World.arguments`, and
returns a `World`. Its name is the last part of the world's name."""
Messages = list[dict[str, str]]
"""A conversation as chat templates take it: `role` and `content` of each message."""


class World(ABC):
    """The tasks and the real environment that an `Experiment` trains and evaluates on.

    An `Environment` says how to step. A world says what an experiment needs around it. A subclass gives `name`, `tasks` and
    `create_environment`; everything else has a default.
    """

    name: str
    """The `environment` of its tasks, e.g. `textworld_express/peckingorder`."""
    arguments: Mapping[str, object] = {}
    """Keyword arguments that create the world, JSON-serialisable (a function by its name). Stored in the experiment's folder,
    which refuses a world with others."""
    settings: Settings = Settings()
    """Default settings of an experiment on this world."""
    max_steps: int = 30
    """Actions after which an episode is cut short, in the dream and in reality."""
    assisted: bool = False
    """True if the world's own rules answer or judge in its dream. Results say "assisted by the world's rules"."""
    judged_by_dream: bool = True
    """True if judges of the dream decide a dreamed episode's reward. False for a world that verifies dreamed episodes itself:
    then there is no gate before training."""
    user: User | None = None
    """Replies to the agent in dreamed episodes. None: nobody does."""
    needs_model: bool = True
    """True if the dream needs an experience model. False for a world that brings its own dream."""

    promises: str = ""
    """The isolation of dreamed episodes on this machine, in words, for the report. Empty where none is needed."""

    @property
    def source(self) -> Mapping[str, object] | None:
        """Source of an agent's world, for the `langgraph.json` of an export (`export_policy`)."""
        return None

    @abstractmethod
    def tasks(self, split: Split, *, limit: int | None = None, seed: int = 0) -> Sequence[Task]:
        """The real tasks of a split. The splits share no task.

        Args:
            limit: Maximum number of tasks, of all splits together. None: all.
            seed: Selects among a world's unlimited tasks; a world with a fixed set ignores it.
        """

    def stored_tasks(self, replay_buffer: ReplayBuffer, split: Split) -> list[Task]:
        """The tasks of a split that an experiment plays. Default: the world's in the buffer."""
        return replay_buffer.tasks(split=split, origin="real", environment=self.name)

    @abstractmethod
    def create_environment(self) -> Environment:
        """A real environment for one episode. Called in the event loop: it must not block."""

    def create_dream(self, model: Model) -> Dream:
        """The dream of this world. Args: `model`, the experience model, with the experiment's replay buffer.

        Default: `model` answers every action and judges text agents; a `ModelJudge` judges tool agents.
        """
        return Dream([model], judges=[ModelJudge(model)])

    def collect(self, tasks: Sequence[Task], episodes: Mapping[str, int], *, seed: int) -> Iterable[Trajectory]:
        """Real offline trajectories of scripted policies; `rollout_index` numbers those of a task.

        Args: `episodes`, number by name of the scripted policy.
        """
        raise ConfigurationError(
            f"the world {self.name} has no scripted policies to collect trajectories with: let the start policy collect "
            "(Settings(episodes={'start': 50})), or import recorded traces (`load_traces`, `dreamgym import`)"
        )

    def agent(self, policy: BaseChatModel, *, real: bool) -> Agent:
        """The agent that plays an episode, dreamed or `real`. Default: the episode graph, whose policy acts in text."""
        from dreamgym_lg.graphs.episode import create_episode_graph

        return create_episode_graph(policy, max_steps=self.max_steps).compile()

    def task_generator(self, tasks: Sequence[Task], replay_buffer: ReplayBuffer) -> TaskGenerator | None:
        """The generator of variations of the training tasks `tasks`, for the curriculum. None: no variations."""
        return None

    def check_task(self, task: Task) -> str | None:
        """Reason against training on a generated task, as one word. None if there is none."""
        return None

    def as_dreamed(self, recorded: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Recorded trajectories as the environment of a dream would meet them. Default: as they are."""
        return recorded

    def writing_tools(self, replay_buffer: ReplayBuffer) -> Collection[str]:
        """Names of a tool agent's tools that change the world. Default: none."""
        return ()

    def policy_rows(
        self, recorded: Sequence[Trajectory], tokenizer: "PreTrainedTokenizerBase", *, max_new_tokens: int, **rendering: Any
    ) -> list[TrainingRow]:
        """Trajectories as rows of supervised training of a policy. Default: from `conversation`.

        Args: `max_new_tokens`, maximum tokens of a reply in rollouts; `rendering`, the policy's `chat_template_kwargs`, if any.

        Raises `ConfigurationError` if a recorded reply has more, which the policy could never give.
        """
        from dreamgym_lg.integrations.trl.rows import reply_lengths, tokenize

        rows = tokenize(tokenizer, [self.conversation(trajectory) for trajectory in recorded], **rendering)
        lengths = [length for row in rows for length in reply_lengths(row)]
        if (longest := max(lengths, default=0)) > max_new_tokens:
            cut = sum(length > max_new_tokens for length in lengths)
            raise ConfigurationError(
                f"{cut} of {len(lengths)} recorded replies have more than policy_tokens={max_new_tokens} tokens, where the "
                f"policy is cut off: raise policy_tokens (Settings) to {longest} or more"
            )
        return rows

    def conversation(self, trajectory: Trajectory) -> Messages:
        """The policy's conversation in a trajectory, for supervised training. Default: that of the episode graph."""
        first = trajectory.steps[0].observation
        messages = [{"role": "system", "content": trajectory.task.instruction}, {"role": "user", "content": first}]
        for step in trajectory.steps:
            messages += [{"role": "assistant", "content": step.action}, {"role": "user", "content": step.next_observation}]
        return messages[:-1]


def world_names() -> list[str]:
    """The names of all installed worlds."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def load_world(name: str, **arguments: object) -> World:
    """Create the installed world of this name. Raises `ConfigurationError` for an unknown one."""
    point = next((point for point in entry_points(group=GROUP) if point.name == name), None)
    if point is None:
        unknown = ConfigurationError.unknown("world", name, world_names())
        raise ConfigurationError(f"{unknown} There is no folder of that name either.")
    world = point.load()(**arguments)
    if not isinstance(world, World):
        raise ConfigurationError(f"the entry point {name!r} of {GROUP} created {world!r}; it has to be a World")
    return world
