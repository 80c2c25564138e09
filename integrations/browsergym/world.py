"""MiniWoB++, WebArena and WebArena-Lite as worlds of an experiment."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.world import World
from dreamgym_lg.integrations.browsergym.actions import as_call, check_action
from dreamgym_lg.integrations.browsergym.agent import BrowserAgent, chosen_actions
from dreamgym_lg.integrations.browsergym.browsers import Browsers
from dreamgym_lg.integrations.browsergym.data import Benchmark, load_tasks
from dreamgym_lg.integrations.browsergym.environment import BrowserGym, make_tasks
from dreamgym_lg.integrations.text_games.game import Rules
from dreamgym_lg.learner import TrainingRow
from dreamgym_lg.types import Split, Task, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SHORT_TASKS = (
    *("choose-list", "click-button", "click-button-sequence", "click-checkboxes", "click-checkboxes-large", "click-dialog"),
    *("click-checkboxes-transfer", "click-dialog-2", "click-link", "click-option", "click-tab", "click-test", "click-test-2"),
    *("click-test-transfer", "enter-password", "enter-text", "enter-text-dynamic", "focus-text", "focus-text-2", "login-user"),
    "unicode-test",
)
"""Tasks of MiniWoB++ that a few actions solve."""


class BrowserGymWorld(World):
    """A benchmark of BrowserGym, played by an agent with one tool per action (`BrowserAgent`).

    It needs recorded traces. WebArena-Lite is trained on WebArena's tasks without the sources of its own 165, its test tasks.

    Args:
        names: Of MiniWoB++: the tasks. Default: `SHORT_TASKS`.
        max_steps: Actions after which an episode is truncated. Default: 15, for WebArena 30 (as its authors).
        actions: As `BrowserTools`.
        browsers: As `Browsers`.

    Raises `ConfigurationError` for an unknown task of MiniWoB++, names for another benchmark, and an unknown action.
    """

    assisted = True
    settings = Settings(tasks=640, retrieved=1, retrieved_characters=600, policy_tokens=48)

    def __init__(
        self,
        benchmark: Benchmark = "miniwob",
        *,
        names: Iterable[str] | None = None,
        max_steps: int | None = None,
        actions: Sequence[str] | None = None,
        browsers: int | None = None,
    ) -> None:
        if names is not None and benchmark != "miniwob":
            raise ConfigurationError(f"names={list(names)} for {benchmark}; only tasks of miniwob are named")
        self.name = self.benchmark = benchmark
        if benchmark != "miniwob":  # whose tasks a number of seeds makes; the others' lists are fixed
            self.settings = replace(self.settings, tasks=None)
        self.names = list(SHORT_TASKS if names is None else names)
        if benchmark == "miniwob":
            load_tasks(benchmark, names=self.names)  # an unknown one is named at once
        self.max_steps = max_steps or (15 if benchmark == "miniwob" else 30)
        self.actions = None if actions is None else list(chosen_actions(benchmark, actions))
        arguments = {"max_steps": self.max_steps, "actions": self.actions}
        self.arguments = arguments | ({"names": self.names} if benchmark == "miniwob" else {})
        self._browsers = Browsers(browsers)
        self._made: dict[range, list[Task]] = {}

    def tasks(self, split: Split, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        """As `World.tasks`. Each task of MiniWoB++ is opened once, with as many seeds as `limit` allows."""
        if self.benchmark == "miniwob":
            return [task for task in self._miniwob(limit or self.settings.tasks or 0, seed) if task.split == split]
        tasks = load_tasks(self.benchmark)
        if self.benchmark == "webarenalite":
            own = {task.metadata["webarena_id"] for task in tasks}
            others = [task for task in load_tasks("webarena") if int(task.metadata["task"].split(".")[1]) not in own]
            tasks = [task for task in others if task.split != "test"] + tasks
        return [task for task in tasks[:limit] if task.split == split]

    def create_environment(self) -> BrowserGym:
        return BrowserGym(self._browsers, max_steps=self.max_steps)

    def create_dream(self, model: Model) -> Dream:
        return Dream([Rules(lambda action, observations: check_action(self.benchmark, action)), model])

    def agent(self, policy: BaseChatModel, *, real: bool) -> BrowserAgent:
        return BrowserAgent(policy, actions=self.actions, max_steps=self.max_steps)

    def policy_rows(
        self, recorded: Sequence[Trajectory], tokenizer: "PreTrainedTokenizerBase", **options: Any
    ) -> list[TrainingRow]:
        """Rows of the agent's rollouts, its policy calling a tool for each of these actions."""
        from dreamgym_lg.integrations.trl.rows import replayed_rows

        agent, say = partial(self.agent, real=False), partial(as_call, self.benchmark)
        return replayed_rows(agent, recorded, tokenizer, **options, say=say)

    def _miniwob(self, limit: int, seed: int) -> list[Task]:
        names = self.names[:limit]
        each = max(1, limit // len(names))
        key = range(seed * 100_000, seed * 100_000 + each)
        if key not in self._made:
            chosen = [task for name in names for task in _of_each_split(name, key.start, each)]
            with closing(self.create_environment()) as environment:
                tasks = make_tasks(chosen, environment)
            # of every name as many among the first so many as there are, whatever their number
            self._made[key] = sorted(tasks, key=lambda task: task.seed or 0)
        return self._made[key]


def _of_each_split(name: str, first: int, number: int) -> Iterator[Task]:
    """Tasks of a name from a seed on. A quarter test, a tenth validation, the others train."""
    left = {"test": number // 4, "validation": number // 10}
    left["train"] = number - sum(left.values())
    for task in load_tasks("miniwob", names=[name], seeds=range(first, first + 10 * number + 20)):
        left[task.split] -= 1
        if left[task.split] >= 0:
            yield task


webarena, webarenalite = partial(BrowserGymWorld, "webarena"), partial(BrowserGymWorld, "webarenalite")
"""The worlds of these names of the command line."""
