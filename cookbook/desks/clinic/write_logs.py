"""Run the old bot on train tasks and write one JSON line per episode."""

import argparse
import json
import random
import tempfile
from pathlib import Path

import world
from agent import SYSTEM, build
from langchain_core.messages import convert_to_openai_messages
from predecessor import Predecessor


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default="logs.jsonl")
    ap.add_argument("--episodes", type=int, default=300)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--world", type=int, default=world.SEED, help="seed of the database and its tasks")
    args = ap.parse_args()
    tasks = list(world.make_tasks("train", args.world))
    random.Random(args.seed).shuffle(tasks)
    with tempfile.TemporaryDirectory() as tmp, open(args.out, "w") as out:
        master, db = Path(tmp, "master.db"), Path(tmp, "episode.db")
        world.reset(master, args.world)
        for task in tasks[: args.episodes]:
            world.episode_db(master, db)
            agent = build(Predecessor(rng=random.Random(f"{args.seed}/{task['id']}")), db)
            messages = agent.invoke({"messages": [("user", task["instruction"])]})["messages"]
            reward = world.check(task, master, db, messages[-1].text)
            chat = [{"role": "system", "content": SYSTEM}, *convert_to_openai_messages(messages)]
            out.write(
                json.dumps({"task_id": task["id"], "instruction": task["instruction"], "messages": chat, "reward": reward})
                + "\n"
            )


if __name__ == "__main__":
    main()
