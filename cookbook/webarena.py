"""An ordinary agent in a real browser: one `create_agent` with a tool per BrowserGym action, on WebArena or MiniWoB++.

Run: python cookbook/webarena.py --model openai:gpt-5.4-mini            (WebArena-Lite, on sites of yours)
     python cookbook/webarena.py --model openai:gpt-5.4-mini --benchmark miniwob           (no site is needed)
Needs: pip install 'dreamgym-lg[browsergym]' and Chromium (`playwright install chromium`, Debian: chromium-headless-shell);
       for WebArena also what the error below names: its packages, and the addresses of its sites.

The episodes go to a file that `dreamgym import` reads: with a few hundred of them, the same agent is trained in the dream
(docs/how-to/agent.md).
Nobody has run the WebArena part on real sites yet: here it was run up to the first missing one.
"""

import argparse
import asyncio
import json
import os
import sys
from contextlib import closing
from pathlib import Path

from langchain_core.messages import BaseMessage, message_to_dict

from dreamgym_lg.errors import DreamGymError
from dreamgym_lg.integrations.browsergym.agent import BrowserTools, create_agent_graph
from dreamgym_lg.integrations.browsergym.browsers import Browsers
from dreamgym_lg.integrations.browsergym.data import check_sites, load_tasks
from dreamgym_lg.integrations.browsergym.environment import BrowserGym
from dreamgym_lg.integrations.browsergym.world import SHORT_TASKS
from dreamgym_lg.types import Task


async def play(task: Task, model: str, browsers: Browsers, max_steps: int) -> tuple[list[BaseMessage], float]:
    """The conversation of one episode and its real reward."""
    with closing(BrowserGym(browsers, max_steps=max_steps)) as environment:
        page = BrowserTools(environment, task)
        config = {"recursion_limit": 3 * max_steps, "max_concurrency": 1}
        state = await create_agent_graph(model, page).ainvoke({"messages": await page.start()}, config)
        return state["messages"], page.reward


def main() -> None:
    parser = argparse.ArgumentParser(description="An agent on BrowserGym's tasks")
    parser.add_argument("--benchmark", choices=["webarenalite", "webarena", "miniwob"], default="webarenalite")
    parser.add_argument("--model", required=True, help="e.g. openai:gpt-5.4-mini")
    parser.add_argument("--limit", type=int, default=8, help="so many tasks, evenly spread")
    parser.add_argument("--max-steps", type=int, default=30, help="actions of an episode")
    parser.add_argument("--out", type=Path, default=Path("traces.jsonl"), help="where the conversations go")
    arguments = parser.parse_args()
    if arguments.benchmark == "miniwob":
        tasks = load_tasks("miniwob", names=SHORT_TASKS, seeds=range(5))
    else:
        tasks = load_tasks(arguments.benchmark)
    print(f"{arguments.benchmark}: {len(tasks)} tasks, the first: {tasks[0].instruction!r}")
    if arguments.benchmark != "miniwob":
        check_sites(os.environ)
    browsers, rewards = Browsers(1), list[float]()
    chosen = tasks[:: max(1, len(tasks) // arguments.limit)][: arguments.limit]
    with arguments.out.open("a", encoding="utf-8") as out:
        for task in chosen:
            messages, reward = asyncio.run(play(task, arguments.model, browsers, arguments.max_steps))
            rewards.append(reward)
            print(json.dumps({"messages": list(map(message_to_dict, messages)), "reward": reward}), file=out, flush=True)
            print(f"  {task.id}: {reward:g}", flush=True)
    print(f"conversations in {arguments.out}; next: dreamgym import {arguments.out} --to replay.db")
    browsers.close()
    print(f"{sum(reward >= 1 for reward in rewards)} of {len(rewards)} tasks solved")


if __name__ == "__main__":
    try:
        main()
    except DreamGymError as error:
        sys.exit(str(error))
