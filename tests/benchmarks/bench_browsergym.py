"""Speed and memory of one browser: MiniWoB++ as `BrowserGym` plays it, and stock BrowserGym for comparison.

Run: python tests/benchmarks/bench_browsergym.py [EPISODES]

Memory is the browser's own processes, each page that several share counted in parts (PSS); the driver and the Python process
around it are said apart.
"""

import importlib
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from statistics import median

import psutil

from dreamgym_lg.integrations.browsergym import child
from dreamgym_lg.integrations.browsergym.browsers import Browsers
from dreamgym_lg.integrations.browsergym.data import load_tasks
from dreamgym_lg.integrations.browsergym.environment import BrowserGym


def timed(call: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def memory() -> tuple[float, float]:
    """MiB of the browser's processes, and of what else was started here."""
    browser = rest = 0
    for process in psutil.Process().children(recursive=True):
        try:
            used = process.memory_full_info().pss
            if "chrom" in process.name() or "headless" in process.name():
                browser += used
            else:
                rest += used
        except psutil.NoSuchProcess:
            continue
    return browser / 2**20, rest / 2**20


def line(name: str, resets: Iterable[float], steps: Iterable[float], used: tuple[float, float]) -> str:
    resets, steps = sorted(resets), sorted(steps)
    return (
        f"{name:22} reset {median(resets):.2f} s (most {resets[-1]:.2f}), step {median(steps):.2f} s (most {steps[-1]:.2f}), "
        f"browser {used[0]:.0f} MiB, driver and Python {used[1]:.0f} MiB"
    )


def ours(episodes: int) -> str:
    browsers, resets, steps, used = Browsers(1), list[float](), list[float](), (0.0, 0.0)
    tasks = load_tasks("miniwob", names=["login-user"], seeds=range(episodes))
    with closing(BrowserGym(browsers)) as environment:
        first, _ = timed(lambda: environment.reset(tasks[0]))
        for number in range(episodes):
            resets.append(timed(lambda number=number: environment.reset(tasks[number]))[0])  # type: ignore[misc]
            for bid in ("16", "19"):
                steps.append(timed(lambda bid=bid: environment.step(f"click('{bid}')"))[0])  # type: ignore[misc]
            used = max(used, memory())
    browsers.close()
    return line("ours", resets, steps, used) + f", first reset {first:.1f} s"


def stock(episodes: int) -> str:
    """BrowserGym as it comes, but for the path of the browser."""
    import gymnasium
    from browsergym import core
    from playwright.sync_api import sync_playwright

    child._locate_miniwob()
    importlib.import_module("browsergym.miniwob")
    playwright = sync_playwright().start()
    path, launch = child.find_browser(playwright.chromium.executable_path), playwright.chromium.launch
    playwright.chromium.launch = lambda **given: launch(**given, executable_path=path)  # type: ignore[method-assign]
    core._set_global_playwright(playwright)
    environment = gymnasium.make("browsergym/miniwob.login-user")
    resets, steps = list[float](), list[float]()
    for seed in range(episodes):
        resets.append(timed(lambda seed=seed: environment.reset(seed=seed))[0])  # type: ignore[misc]
        steps += [timed(lambda bid=bid: environment.step(f"click('{bid}')"))[0] for bid in ("16", "19")]  # type: ignore[misc]
    used = memory()
    environment.close()
    playwright.stop()
    return line("stock BrowserGym", resets, steps, used)


def main() -> None:
    episodes = int(sys.argv[1]) if len(sys.argv) > 1 else 32
    print(ours(episodes), flush=True)
    print(stock(min(episodes, 4)), flush=True)


if __name__ == "__main__":
    main()
