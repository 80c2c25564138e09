"""What rollouts cost beside the models' forward passes: LangGraph, the chat-model layer, retrieval and SQLite.

The same models play the same episodes three times: in a bare asyncio loop, through `rollout` with the episode graph and the
replay buffer, and so with retrieved demonstrations as well. Then a whole iteration: those rollouts and the GRPO update on
them. The models have the demo's size, and a larger one, and are trained for a few steps on answers of a fixed form, so that
every answer can be read. All of it is done twice: with both models in this process, and, as the demo does, with the
experience model in one of its own.

Run: python tests/benchmarks/bench_orchestration.py [result.json]
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

from dreamgym_lg.dream.dream import Dream
from dreamgym_lg.dream.model import Model
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.graphs.episode import create_episode_graph, read_action
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.trl.learners import GRPOLearner
from dreamgym_lg.integrations.trl.rows import tokenize
from dreamgym_lg.integrations.trl.sft import save_model, train_sft
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Step, Task, Trajectory

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny"))
from tiny_models import create_model, create_tokenizer  # noqa: E402

NUM_TASKS = 8
NUM_GENERATIONS = 8
MAX_STEPS = 6
OFFLINE = 3000
"""Recorded episodes in the buffer, of MAX_STEPS steps each: what is retrieved from."""
DEMONSTRATIONS = 1
SFT_STEPS = 200
ROUNDS = 3
"""Iterations measured of each way, after one to warm up."""
ITEMS = ("apple", "pear", "plum", "lemon", "grape", "melon", "peach", "olive", "onion", "carrot", "leek", "radish")
PLACES = ("shelf", "table", "showcase", "counter", "basket", "fridge", "drawer", "box")
INSTRUCTION = "Your task is to read the instructions and to take the things they name, in their order, one after the other."
ANSWER = "You take it. It is in your hands now, and nothing else has changed."

Play = Callable[[int], Awaitable[Sequence[Trajectory]]]
Passes = Callable[[], Sequence[tuple[float, float]]]
Messages = list[dict[str, str]]


def make_task(number: int) -> Task:
    rng = random.Random(number)
    seen = ". ".join(f"On the {place} there is a {' and a '.join(rng.sample(ITEMS, 3))}" for place in rng.sample(PLACES, 4))
    return Task(id=f"t{number}", instruction=INSTRUCTION, environment="bench", observation=f"{seen}.")


def offline_episode(number: int) -> Trajectory:
    rng, task = random.Random(number), make_task(number % 500)
    seen, steps = str(task.observation), []
    for _ in range(MAX_STEPS):
        action = f"take the {rng.choice(ITEMS)} from the {rng.choice(PLACES)}"
        if number % 2:  # so that the experience model answers whatever a policy may say
            action = " ".join(rng.choices([*action.split(), *seen.split()], k=rng.randrange(1, 8)))
        steps.append(Step(observation=seen, action=action, next_observation=ANSWER))
        seen = ANSWER
    return Trajectory(task=task, steps=steps, run="offline", rollout_index=number)


def policy_conversation(episode: Trajectory) -> Messages:
    messages = [{"role": "system", "content": INSTRUCTION}]
    for step in episode.steps:
        messages += [{"role": "user", "content": step.observation}, {"role": "assistant", "content": step.action}]
    return messages


def experience_conversation(experience: Model, episode: Trajectory) -> Messages:
    roles = {"human": "user", "ai": "assistant"}
    return [{"role": roles.get(m.type, m.type), "content": m.text} for m in experience.training_conversation(episode)]


def make_models(buffer: ReplayBuffer, episodes: Sequence[Trajectory], folder: Path, **size: int) -> None:
    """Policy and experience model; they learn what the forms are and nothing else."""
    grounded = Model(None, replay_buffer=buffer, demonstrations=DEMONSTRATIONS, instructions="")
    plain = Model(None, instructions="")
    answered = [experience_conversation(plain if i % 4 < 2 else grounded, episode) for i, episode in enumerate(episodes)]
    acted = [policy_conversation(episode) for episode in episodes[::2]]
    tokenizer = create_tokenizer(message["content"] for conversation in answered for message in conversation)
    for seed, (name, conversations) in enumerate((("policy", acted), ("experience", answered))):
        model = create_model(tokenizer, seed=seed, **size)
        train_sft(model, tokenizer, tokenize(tokenizer, conversations), steps=SFT_STEPS, batch_size=4, learning_rate=1e-3)
        save_model(model, tokenizer, folder / name)


def graph_rollouts(policy: LocalChatModel, buffer: ReplayBuffer, experience: Model, run: str) -> Play:
    """As the training graph plays an iteration."""

    async def play(iteration: int) -> Sequence[Trajectory]:
        return await rollout(
            create_episode_graph(policy, max_steps=MAX_STEPS).compile(),
            tasks_of(iteration),
            lambda: Dream([experience]).create_environment(),
            num_generations=NUM_GENERATIONS,
            source="synthetic",
            run=run,
            iteration=iteration,
            replay_buffer=buffer,
        )

    return play


def bare_rollouts(policy: LocalChatModel, experience: Model) -> Play:
    """The least that plays the same episodes: no graph, no buffer."""

    async def episode(task: Task, seed: int) -> Trajectory:
        environment, steps = Dream([experience]).create_environment(), list[Step]()
        with TokenRecorder(seed=seed) as recorder:
            seen = environment.reset(task)
            messages: list[BaseMessage] = [SystemMessage(task.instruction), HumanMessage(seen)]
            for _ in range(MAX_STEPS):
                reply = await policy.ainvoke(messages)
                try:
                    result = await environment.astep(read_action(reply.text))
                except PredictionFailed as error:
                    return Trajectory(task=task, steps=steps, error=str(error))
                steps.append(Step(observation=seen, action=reply.text, next_observation=result.observation))
                seen = result.observation
                messages += [reply, HumanMessage(seen)]
                if result.terminated:
                    break
        return Trajectory(task=task, steps=steps, segments=recorder.segments())

    async def play(iteration: int) -> Sequence[Trajectory]:
        seeds = range(1000 * iteration, 1000 * iteration + NUM_GENERATIONS)
        return await asyncio.gather(*(episode(task, seed) for task in tasks_of(iteration) for seed in seeds))

    return play


def whole_iterations(play: Play, policy: LocalChatModel, folder: Path) -> tuple[Play, Passes]:
    """The rollouts and the GRPO update on them, rewards drawn at random; when its forward and backward passes were."""
    learner = GRPOLearner(policy.model, policy.tokenizer, folder / "learner")
    trainer, passes = learner._trainer, list[tuple[float, float]]()

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = work(*args, **kwargs)
            passes.append((start, time.perf_counter()))
            return result

        return run

    trainer.reference_log_probs = timed(trainer.reference_log_probs)
    trainer.compute_loss = timed(trainer.compute_loss)
    trainer.accelerator.backward = timed(trainer.accelerator.backward)

    async def iterate(iteration: int) -> Sequence[Trajectory]:
        episodes, rng = await play(iteration), random.Random(iteration)
        paid = [replace(e, steps=[replace(step, reward=rng.random()) for step in e.steps]) for e in episodes]
        groups = [paid[i : i + NUM_GENERATIONS] for i in range(0, len(paid), NUM_GENERATIONS)]
        learner.update([group for group in groups if all(episode.error is None for episode in group)])
        return episodes

    return iterate, lambda: passes


def tasks_of(iteration: int) -> list[Task]:
    return [make_task(1000 + NUM_TASKS * iteration + i) for i in range(NUM_TASKS)]


def measure(play: Play, models: Sequence[LocalChatModel], passes: Passes = list) -> dict[str, float]:
    """Means over ROUNDS iterations of new tasks; `outside` is the share of wall time in which no model computed.

    `passes`: when the forward and backward passes were that are not the models' own answers.
    """
    wall = busy = forwards = steps = failed = 0.0
    for iteration in range(ROUNDS + 1):
        start = time.perf_counter()
        episodes = asyncio.run(play(iteration))  # type: ignore[arg-type]
        end = time.perf_counter()
        if iteration:  # the first one warms up
            forward = [each for model in models for each in model.engine.passes if each[0] > start]
            wall += end - start
            busy += covered([*forward, *(each for each in passes() if each[0] > start)])
            forwards += len(forward)
            steps += sum(len(episode.steps) for episode in episodes)
            failed += sum(episode.error is not None for episode in episodes)
        for model in models:
            model.weights_changed()
    played = ROUNDS * NUM_TASKS * NUM_GENERATIONS
    return {
        "episodes_per_minute": 60 * played / wall,
        "seconds_per_iteration": wall / ROUNDS,
        "outside_seconds": (wall - busy) / ROUNDS,
        "outside": (wall - busy) / wall,
        "forward_passes": forwards / ROUNDS,
        "steps": steps / played,
        "failed": failed / played,
    }


def covered(passes: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one pass ran."""
    total = until = 0.0
    for start, end in sorted(passes):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


SIZES = {"1 M": {}, "8 M": {"hidden_size": 384, "layers": 5}}
"""Of policy and experience model each; the first is the demo's."""


def ways_of(size: str, buffer: ReplayBuffer, folder: Path, own_process: bool) -> Iterator[tuple[str, dict[str, float]]]:
    policy = LocalChatModel.from_path(folder / "policy", max_new_tokens=16)
    answers = LocalChatModel.from_path(folder / "experience", max_new_tokens=80, temperature=0, own_process=own_process)
    run = f"{size} {own_process}"
    plain = Model(answers, instructions="", retries=0)
    grounded = Model(answers, replay_buffer=buffer, demonstrations=DEMONSTRATIONS, instructions="", retries=0)
    grounded.demonstrations("an apple", "take it", make_task(0))  # builds the index
    plays = {
        "bare loop": bare_rollouts(policy, plain),
        "rollout": graph_rollouts(policy, buffer, plain, f"plain {run}"),
        "rollout, retrieval": graph_rollouts(policy, buffer, grounded, f"grounded {run}"),
    }
    for name, play in plays.items():
        plain.refreshed("1")
        yield name, measure(play, (policy, answers))
    grounded.refreshed("2")
    play = graph_rollouts(policy, buffer, grounded, f"whole {run}")
    iterate, passes = whole_iterations(play, policy, folder / f"{own_process}")
    yield "iteration", measure(iterate, (policy, answers), passes)


def main() -> None:
    results = []
    with tempfile.TemporaryDirectory() as folder, ReplayBuffer(Path(folder) / "replay.db") as buffer:
        buffer.extend(offline_episode(number) for number in range(OFFLINE))
        print(f"{NUM_TASKS * NUM_GENERATIONS} episodes of {MAX_STEPS} steps at once, {torch.get_num_threads()} torch threads")
        columns = f"{'episodes/min':>13}{'s/iteration':>13}{'outside s':>11}{'outside':>9}{'forwards':>10}{'steps':>6}"
        print(f"{'processes':<25}{columns}")
        offline = list(buffer.trajectories(run="offline", limit=160))
        for size, own_process in product(SIZES, (False, True)):
            if not own_process:
                make_models(buffer, offline, Path(folder) / size, **SIZES[size])
            for name, row in ways_of(size, buffer, Path(folder) / size, own_process):
                print(
                    f"{size:<4}{1 + own_process:>2}  {name:<19}"
                    f"{row['episodes_per_minute']:>13,.0f}{row['seconds_per_iteration']:>13.2f}"
                    f"{row['outside_seconds']:>11.2f}{row['outside']:>9.1%}{row['forward_passes']:>10.0f}{row['steps']:>6.1f}",
                    flush=True,
                )
                if row["failed"] > 0.05:
                    print(f"{name}: {row['failed']:.0%} of the episodes failed, the figures mean little", file=sys.stderr)
                results.append({"size": size, "processes": 1 + own_process, "way": name, **row})
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
