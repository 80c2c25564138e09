"""The worker process: one browser that plays BrowserGym tasks one after the other.

Run as a file by `browsers` (`child_process.Child`); it imports nothing of this library, which would take it a second more to
start. It plays in its main thread, to which Playwright is bound. A second thread reads the requests, so that the process ends
when its parent does, whatever it is doing; Playwright's driver and the browser end with it.
"""

import contextlib
import importlib
import importlib.util
import os
import pickle
import queue
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""Looked for on PATH where Playwright has no browser of its own. The first takes half of the others' memory."""
OPTIONS = ["--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
"""Command-line options of the system's browser in a container: no graphics card, a small /dev/shm."""
NO_BROWSER = (
    "BrowserGym needs Chromium: there is neither Playwright's own nor one on PATH; run `playwright install chromium`, or on "
    "Debian and Ubuntu `apt-get install chromium-headless-shell` (or `chromium`)"
)
NO_CLOCK = {"episode_max_time": 2_000_000_000}
"""In milliseconds. MiniWoB++'s own limit would depend on the machine's and policy's speed."""


class Missing(Exception):
    """Something has to be installed first."""


def find_browser(own: str) -> str:
    """Path of the browser to launch: Playwright's `own` if it exists, else one of `BROWSERS`."""
    path = own if os.path.exists(own) else next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if path is None:
        raise Missing(NO_BROWSER)
    return path


class KeptBrowser:
    """Replaces Playwright's browser type, by which BrowserGym would launch one for each episode."""

    def __init__(self, playwright: Any) -> None:
        self.selectors, self.chromium = playwright.selectors, self
        self._chromium, self._browser = playwright.chromium, None

    def launch(self, args: Sequence[str] = (), ignore_default_args: Any = None, **ignored: Any) -> "KeptBrowser":
        """The browser. `slow_mo`, a pause of BrowserGym's before each of Playwright's acts, is left out."""
        if self._browser is None:
            path = find_browser(self._chromium.executable_path)
            self._browser = self._chromium.launch(
                headless=True, executable_path=path, args=[*args, *OPTIONS], ignore_default_args=ignore_default_args
            )
        return self

    def new_context(self, **options: Any) -> Any:
        return self._browser.new_context(**options)  # type: ignore[attr-defined] # it was launched

    def close(self) -> None:
        """Called between two episodes: the browser stays."""


class Messages:
    """Replaces BrowserGym's chat, which opens a browser of its own."""

    def __init__(self, **ignored: Any) -> None:
        self.messages: list[dict[str, Any]] = []

    def add_message(self, role: str, msg: str) -> None:
        if role != "info":
            self.messages.append({"role": role, "timestamp": time.time(), "message": msg})

    def close(self) -> None:
        pass


class Player:
    """The episode under way, and the browser."""

    def __init__(self) -> None:
        from browsergym import core
        from browsergym.core import env
        from playwright.sync_api import sync_playwright

        self._playwright = sync_playwright().start()
        core._set_global_playwright(KeptBrowser(self._playwright))
        env.Chat = Messages
        self._env: Any = None
        self._played: tuple[str, list[str], float] | None = None

    def reset(self, task: str, seed: int, actions: list[str], delay: float) -> dict[str, Any]:
        if (task, actions, delay) != self._played:
            self._played = None
            if self._env is not None:
                self._env.close()
            self._env, self._played = _create(task, actions, delay), (task, actions, delay)
        observation, _ = self._env.reset(seed=seed)
        return {"goal": observation["goal"], "page": _as_text(observation)}

    def step(self, action: str) -> dict[str, Any]:
        observation, reward, terminated, _, _ = self._env.step(action)
        error = observation["last_action_error"].partition("\n")[0]
        return {"page": _as_text(observation), "error": error, "reward": float(reward), "terminated": bool(terminated)}

    def stop(self) -> None:
        self._playwright.stop()


def _create(task: str, actions: Sequence[str], delay: float) -> Any:
    import gymnasium
    from browsergym.core.action import functions
    from browsergym.core.action.highlevel import HighLevelActionSet

    benchmark = task.partition(".")[0]
    if benchmark == "miniwob":
        _locate_miniwob()
    try:
        importlib.import_module(f"browsergym.{benchmark}")
    except ImportError as error:
        raise Missing(f"{error}; install the benchmark's package, such as browsergym-{benchmark}") from error
    allowed = HighLevelActionSet(
        ["custom"], [getattr(functions, name) for name in actions], multiaction=False, demo_mode="off", strict=True
    )
    return gymnasium.make(
        f"browsergym/{task}",
        disable_env_checker=True,
        task_kwargs=NO_CLOCK if benchmark == "miniwob" else {},
        action_mapping=allowed.to_python_code,
        pre_observation_delay=delay,
        use_raw_page_output=True,  # no screenshot and no copy of the page
    ).unwrapped


def _locate_miniwob() -> None:
    """Its pages are in the package, unless the user serves them."""
    if "MINIWOB_URL" not in os.environ:
        package = importlib.util.find_spec("miniwob")
        if package is None or package.origin is None:
            raise Missing("MiniWoB++'s pages are missing; run: pip install miniwob")
        os.environ["MINIWOB_URL"] = (Path(package.origin).parent / "html" / "miniwob").as_uri() + "/"


def _as_text(observation: Mapping[str, Any]) -> str:
    """The accessibility tree of the page in front, and the list of tabs.

    Tabs are listed where there are several or the page has an address. The page's own words are quoted by `repr`, so that they
    cannot begin a line.
    """
    import playwright.sync_api as api
    from browsergym.core import observation as extract
    from browsergym.utils import obs

    page = observation["page"]
    for tries_left in reversed(range(5)):
        try:
            extract._pre_extract(page, lenient=tries_left == 0)
            properties = extract.extract_dom_extra_properties(extract.extract_dom_snapshot(page), scale_factor=1.0)
            tree = extract.extract_merged_axtree(page)
            break
        except (api.Error, extract.MarkingError):  # frames come and go while a page is loading
            if not tries_left:
                raise
            extract._post_extract(page)
            time.sleep(0.5)
    extract._post_extract(page)
    for node in tree["nodes"]:  # BrowserGym leaves out a `generic` node, also where a page has made it a link
        if node["role"]["value"] == "generic" and properties.get(node.get("browsergym_id"), {}).get("clickable"):
            node["role"]["value"] = "clickable"
    roles = (*obs.IGNORED_AXTREE_ROLES, "InlineTextBox")
    text: str = obs.flatten_axtree_to_str(tree, ignored_roles=roles, ignored_properties=(*obs.IGNORED_AXTREE_PROPERTIES, "url"))
    text = _without_repetition(text)
    urls, active = observation["open_pages_urls"], int(observation["active_page_index"][0])
    if len(urls) == 1 and not urls[0].startswith("http"):
        return text
    named = enumerate(zip(observation["open_pages_titles"], urls, strict=True))
    tabs = [f"Tab {number}{' (active)' if number == active else ''}: {title!r} {url!r}" for number, (title, url) in named]
    return "\n".join([text, *tabs])


def _without_repetition(text: str) -> str:
    """A tree without uninformative lines: empty or repeated texts, wrappers without a name.

    Of a wrapper the texts within stay; a paragraph stays where it holds text itself.
    """
    lines, kept = text.split("\n"), list[str]()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        content = line.strip()
        static = content.startswith("StaticText ")
        if static and (content == "StaticText ''" or (kept and content.removeprefix("StaticText ") in kept[-1])):
            continue
        bare = content.partition("] ")[2]
        if bare == "LabelText ''" or (bare == "paragraph ''" and not after.strip().startswith("StaticText")):
            continue
        kept.append(line)
    return "\n".join(kept)


def _read(requests: BinaryIO, received: "queue.SimpleQueue[dict[str, Any] | None]", scratch: str) -> None:
    with contextlib.suppress(EOFError):
        while True:
            received.put(pickle.load(requests))
    received.put(None)
    time.sleep(1)
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)  # it plays on, maybe for ever; what it has started ends when its pipes close


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    """Play what is received. `DREAMGYM_BROWSER_SCRATCH` is an empty folder for all temporary files, removed at the end."""
    scratch = os.environ["TMPDIR"] = os.environ["DREAMGYM_BROWSER_SCRATCH"]
    received = queue.SimpleQueue[dict[str, Any] | None]()
    threading.Thread(target=_read, args=(requests, received, scratch), daemon=True).start()
    player: Player | None = None
    try:
        while (request := received.get()) is not None:
            player = player or Player()
            reply = player.reset(**request["reset"]) if "reset" in request else player.step(request["step"])
            _send(replies, reply)
    except Exception as error:  # a browser that failed once is not used again
        from dreamgym_lg.errors import EnvironmentFailed, MissingDependency

        missing = isinstance(error, Missing | ImportError)
        text = str(error) if isinstance(error, Missing) else f"{type(error).__name__}: {error}"
        _send(replies, MissingDependency(text) if missing else EnvironmentFailed(text))
    if player is not None:
        player.stop()
    shutil.rmtree(scratch, ignore_errors=True)


def _send(replies: BinaryIO, message: object) -> None:
    pickle.dump(message, replies)
    replies.flush()
