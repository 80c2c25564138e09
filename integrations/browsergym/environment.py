"""A task of any BrowserGym benchmark as an `Environment`. The page as text, BrowserGym's actions as text."""

import asyncio
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.browsergym.actions import allowed_actions, check_action, normalized
from dreamgym_lg.integrations.browsergym.browsers import Browsers, Seat
from dreamgym_lg.integrations.browsergym.data import check_sites
from dreamgym_lg.integrations.text_games.game import TextGame, one_line
from dreamgym_lg.types import StepResult, Task

OVER = "The task has ended."
"""The observation of the last step: the page behind it is the benchmark's own business."""


class BrowserGym(TextGame):
    """One episode at a time, in a browser held from `reset` to `close`.

    An observation is the page's accessibility tree, a line an element: `[16] button 'Login'`; an action names the number. An
    action that fails is answered by a line `Error: ...` before the page. Reward and end are the benchmark's own; success is a
    reward of 1. A task's `metadata["task"]`, such as `miniwob.login-user`, and `seed` name it as BrowserGym does.

    Args: `browsers`, which any number of instances, threads and event loops may share.
    """

    def __init__(self, browsers: Browsers, *, max_steps: int = 15) -> None:
        super().__init__(max_steps)
        self.browsers = browsers
        self.goal = ""
        """Goal of the last `reset`'s task in the benchmark's own words, on one line."""
        self._seat: Seat | None = None
        self._benchmark, self._page = "", ""

    def reset(self, task: Task) -> str:
        """Waits until a browser is free.

        Raises `ConfigurationError` for metadata that names no task and for addresses of sites that are missing,
        `MissingDependency` without a browser or the benchmark's package, `EnvironmentFailed` if the page cannot be opened.
        """
        self._seen, request = (), _request(task)
        self._seat = self._seat or self.browsers.take().result()
        return self._start(task, request, self._seat)

    async def areset(self, task: Task) -> str:
        """`reset` without a thread that waits for the browser. So those who hold one find a thread to play on."""
        self._seen, request = (), _request(task)
        if self._seat is None:
            taken = self.browsers.take()
            try:
                self._seat = await asyncio.wrap_future(taken)
            except asyncio.CancelledError:
                if not taken.cancel():
                    taken.result().leave()
                raise
        return await asyncio.to_thread(self._start, task, request, self._seat)

    def _start(self, task: Task, request: dict[str, object], seat: Seat) -> str:
        reply = seat.ask({"reset": request})
        self._benchmark = str(request["task"]).partition(".")[0]
        self._page, self.goal = str(reply["page"]), one_line(str(reply["goal"]))
        in_instruction = one_line(task.instruction) == self.goal
        return self.begin(self._page if in_instruction else f"Goal: {self.goal}\n{self._page}")

    def play(self, action: str) -> StepResult:
        """A step that ends the task shows `OVER`. Raises `EnvironmentFailed` if the browser dies, which ends the episode."""
        assert self._seat is not None, "play outside an episode"
        reply = self._seat.ask({"step": normalized(self._benchmark, action)})
        terminated, reward, error = bool(reply["terminated"]), float(reply["reward"]), str(reply["error"])
        self._page = str(reply["page"])
        observation = OVER if terminated else f"Error: {error}\n{self._page}" if error else self._page
        info = {"success": terminated and reward >= 1, "valid": not error}
        return StepResult(observation, reward, terminated, False, info)

    def check_action(self, action: str, observations: Sequence[str]) -> str | None:
        return check_action(self._benchmark, action)

    def close(self) -> None:
        seat, self._seat, self._seen = self._seat, None, ()
        if seat is not None:
            seat.leave()


def make_tasks(tasks: Iterable[Task], environment: BrowserGym) -> list[Task]:
    """Reset each task and add its goal and first page. Those that look alike are left out."""
    tasks_by_page: dict[tuple[str, str], Task] = {}
    for task in tasks:
        environment.reset(task)
        key = environment.goal, environment._page
        tasks_by_page.setdefault(key, replace(task, instruction=environment.goal, observation=environment._page))
    return list(tasks_by_page.values())


def _request(task: Task) -> dict[str, object]:
    """The request for a task's world; raises `ConfigurationError` naming what is missing or wrong."""
    if task.origin == "synthetic":
        raise ConfigurationError(f"task {task.id} is synthetic: no real page belongs to it; play it in the dream")
    name, seed = task.metadata.get("task"), task.seed
    if not isinstance(name, str) or "." not in name or seed is None:
        raise ConfigurationError(
            f"task {task.id} has metadata['task']={name!r} and seed={seed!r}; BrowserGym needs a name such as "
            "'miniwob.login-user' and an integer"
        )
    benchmark = name.partition(".")[0]
    if benchmark in ("webarena", "webarenalite"):
        check_sites(os.environ)
    delay = 0.0 if benchmark == "miniwob" else 0.5  # seconds before the page is read: BrowserGym's, for pages of the network
    return {"task": name, "seed": seed, "actions": list(allowed_actions(benchmark)), "delay": delay}
