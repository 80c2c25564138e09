"""An ordinary agent with real, stateful tools, in the dream: BFCL's trading desk behind `create_agent`, unmodified.

Run: python cookbook/bfcl_agent.py            (minutes on two cores; --quick shows every part in half a minute)
Needs: pip install 'dreamgym-lg[bfcl,train]' && pip install --no-deps bfcl-eval

1. The agent, wrapped with its scripted user, is examined: what would a dream of it simulate?
2. Its recorded episodes go into a replay buffer.
3. A dream's answers are compared with those of the real tools, on tasks that the buffer has never seen.
4. A policy is trained: a few demonstrations, then GRPO in the dream, the guard on.
5. Both are evaluated on the real tools.

No model is downloaded, so nothing here is as good as it would be for you. The experience model is by default no model at all:
the nearest recorded answer of the same tool, which knows nothing of state (`--experience-model openai:gpt-5.4-mini` takes a
real one). The policy has 200,000 parameters and has read fourteen conversations: on held-out tasks it fails.
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from dreamgym_lg import Answer, Dream, DreamGym, Episode, ReplayBuffer, Task
from dreamgym_lg.actions import ToolCall, parse_action, render_call
from dreamgym_lg.integrations.bfcl import (
    BFCLApis,
    arun_turns,
    create_agent_graph,
    ground_truth,
    load_tasks,
    offline_trajectories,
    run_turns,
)
from dreamgym_lg.integrations.bfcl.data import SYSTEM_PROMPT
from dreamgym_lg.integrations.transformers import LocalChatModel
from dreamgym_lg.integrations.transformers.loading import load_tokenizer
from dreamgym_lg.integrations.trl.rows import tokenize
from dreamgym_lg.integrations.trl.sft import train_sft

WRITES = ("add_to_watchlist", "cancel_order", "fund_account", "place_order", "remove_stock_from_watchlist", "trading_login")
WRITES += ("trading_logout", "withdraw_funds")


class Production(BaseChatModel):
    """In the place of the model that your agent has in production. Neither the dream nor the evaluation asks it."""

    @property
    def _llm_type(self) -> str:
        return "production"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        raise AssertionError("the production model was asked")


class Desk:
    """The agent with its user: one conversation of several user turns, on the tools of a fresh apis."""

    def __init__(self, model: BaseChatModel, example: Task) -> None:
        self.model = model
        self.graph = create_agent_graph(model, BFCLApis(example))  # each apis has its own; this one is for `examine`
        self.real_answers = 0
        """How often a real tool has answered so far."""

    def invoke(self, task: Task) -> dict[str, Any]:
        apis = BFCLApis(task)
        messages = run_turns(create_agent_graph(self.model, apis), apis, recursion_limit=20)
        return self._ended(messages, apis)

    async def ainvoke(self, task: Task) -> dict[str, Any]:
        apis = BFCLApis(task)
        messages = await arun_turns(create_agent_graph(self.model, apis), apis, recursion_limit=20)
        return self._ended(messages, apis)

    def _ended(self, messages: Sequence[BaseMessage], apis: BFCLApis) -> dict[str, Any]:
        self.real_answers += len(apis.answers)
        return {"messages": messages, "apis": apis}


class NearestRecorded:
    """A responder without a model: the recorded answer of the same tool whose step is nearest, of another task.

    A baseline, and what a real experience model has to beat. It does not know what was done before in this episode.
    """

    name = "nearest"
    version = "nearest-recorded"

    def __init__(self, replay_buffer: ReplayBuffer) -> None:
        self.replay_buffer = replay_buffer

    def respond(self, episode: Episode) -> Answer:
        action = episode.action
        near = self.replay_buffer.similar(episode.observation, action, k=20, exclude_task=episode.task.id)
        same = [step for step in near if tool_of(step.action) == tool_of(action)]
        nearest = next((step for step in same if step.action == action), same[0] if same else None)
        if nearest is None:
            return Answer("Error: no answer is known.", valid=False)
        return Answer(nearest.next_observation, nearest.valid)


def tool_of(action: str) -> str:
    call = parse_action(action)
    return call.name if isinstance(call, ToolCall) else ""


def calls_made(task: Task, state: Any) -> float:
    """The reward in the dream: the share of the ground truth's calls that were made. It does not ask what else was done.

    The real tools cannot be asked there: they did not run. In reality `apis.success()` compares their state.
    """
    said = [message for message in state["messages"] if isinstance(message, AIMessage)]
    made = Counter(render_call(call["name"], call["args"]) for message in said for call in message.tool_calls)
    wanted = Counter(render_call(call.name, call.arguments) for turn in ground_truth(task) for call in turn)
    return (made & wanted).total() / wanted.total()


def compare_answers(dream: Dream, tasks: Sequence[Task]) -> tuple[int, int]:
    """(equal, all) answers of dream and reality to the ground truth's calls, each knowing its own past."""
    equal = total = 0
    for task in tasks:
        apis, episode = BFCLApis(task), dream.create_environment()
        episode.reset(task)
        episode.show_tools([convert_to_openai_tool(tool) for tool in apis.tools])
        for turn in ground_truth(task):
            for call in turn:
                real = apis.call(call.name, call.arguments).text
                equal += episode.step(render_call(call.name, call.arguments)).observation == real
                total += 1
            apis.end_turn()
    return equal, total


def demonstration(task: Task) -> tuple[list[BaseMessage], list[dict[str, Any]]]:
    """The ground truth as a conversation of the agent, and its tools."""
    apis = BFCLApis(task)
    messages: list[BaseMessage] = [SystemMessage(SYSTEM_PROMPT)]
    for text, turn in zip(apis.user_turns, ground_truth(task), strict=True):
        messages.append(HumanMessage(text))
        for call in turn:
            asked = {"name": call.name, "args": dict(call.arguments), "id": f"call{len(messages)}", "type": "tool_call"}
            messages.append(AIMessage("", tool_calls=[asked]))
            messages.append(ToolMessage(apis.call(call.name, call.arguments).text, tool_call_id=asked["id"], name=call.name))
        messages.append(AIMessage("Done."))
        apis.end_turn()
    return messages, [convert_to_openai_tool(tool) for tool in apis.tools]


def base_policy(model_name: str, tasks: Sequence[Task], *, steps: int) -> LocalChatModel:
    """A tiny model from scratch that has read the demonstrations: enough to call tools, not to know which."""
    demonstrations = [demonstration(task) for task in tasks]
    tokenizer = load_tokenizer(model_name)
    set_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    size = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=8192, **size, **ends))
    rows = [row for messages, tools in demonstrations for row in tokenize(tokenizer, [messages], tools=tools)]
    loss = train_sft(model, tokenizer, rows, steps=steps, batch_size=4, learning_rate=5e-3)
    longest = max(len(row["input_ids"]) for row in rows)
    print(f"  {model.num_parameters():,} parameters, conversations of {longest:,} tokens at most, loss {loss:.2f}")
    return LocalChatModel(model=model, tokenizer=tokenizer, name_or_path="tiny", max_new_tokens=64)


def trading(split: Any) -> list[Task]:
    """The tasks with the smallest set of tools: a tiny model's context is short."""
    return [task for task in load_tasks(split=split) if task.metadata["involved_classes"] == ["TradingBot"]]


def show(title: str) -> None:
    print(f"\n[{time.process_time():4.0f} s of processor time] {title}")


def main() -> None:
    parser = argparse.ArgumentParser(description="BFCL's trading desk in the dream")
    parser.add_argument("--experience-model", help="e.g. openai:gpt-5.4-mini; default: the nearest recorded answer")
    parser.add_argument("--model", default="smollm2-135m", help="folder or hub name of the tokenizer and its chat template")
    parser.add_argument("--quick", action="store_true", help="few steps of everything, to see it run")
    parser.add_argument("--out", type=Path, help="folder of the replay buffer and the checkpoints; default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        walk_through(arguments.out or Path(folder), arguments.model, arguments.experience_model, quick=arguments.quick)


def walk_through(out: Path, model_name: str, experience_model: str | None, *, quick: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    train, held_out = trading("train"), [*trading("validation"), *trading("test")]
    buffer = ReplayBuffer(out / "replay.db")
    buffer.extend(offline_trajectories(load_tasks(split="train"), failures=1))
    desk = Desk(Production(), train[0])
    gym = DreamGym(
        desk,
        replay_buffer=buffer,
        experience_model=experience_model,
        dream=None if experience_model else Dream([NearestRecorded(buffer)]),
        tasks=[*train, *held_out],
        payload=lambda task: task,
        writes=WRITES,
        verify_dream=calls_made,
        verify_real=lambda task, state: state["apis"].success(),
        out=out / "run",
    )

    show("what a dream makes of this agent")
    examination = gym.examine()
    for (kind, handling), count in Counter((part.kind, part.handling) for part in examination.parts).items():
        print(f"  {count:3} {kind}: {handling}")
    print(f"  problems: {len(examination.problems)}")

    show(f"a dream's answers on unseen tasks, from {buffer.count('steps'):,} recorded steps")
    unseen = load_tasks(split="test")[: 5 if quick or experience_model else None]
    dream = gym.experiment.dream()
    equal, total = compare_answers(dream, unseen)
    share = f"{equal} of {total} answers equal to the real ones ({equal / total:.0%})"
    print(f"  {dream.version}: {share}, {len(unseen)} tasks")

    show("the base policy reads demonstrations")
    policy = base_policy(model_name, train, steps=3 if quick else 40)
    base, _ = gym.evaluate(policy.with_temperature(0), real=True, tasks=held_out)

    show("GRPO in the dream, nothing real is touched")
    before = desk.real_answers
    training = {"iterations": 1 if quick else 3, "num_tasks": 2, "num_generations": 4, "learning_rate": 1e-3, "beta": 0.0}
    improved = gym.train(policy, real_budget=0, evaluate_tasks=0, **training)
    for metrics in buffer.metrics(gym.experiment.run_name("train")):
        print(
            f"  iteration {metrics['iteration']}: reward {metrics['reward_mean']:.2f}, {metrics['steps_mean']:.1f} steps, "
            f"{metrics['failed_episodes']} failed, {metrics['trainable_tokens']:.0f} tokens to train on, "
            + ("skipped: every group's rewards were equal" if metrics["skipped"] else "trained")
        )
    dreamed, real = buffer.count("steps", run=gym.experiment.run_name("train")), desk.real_answers - before
    print(f"  dreamed steps: {dreamed}, answers of real tools: {real}")

    show("on the real tools, held-out tasks, greedy")
    trained, _ = gym.evaluate(improved.with_temperature(0), real=True, tasks=held_out)
    for name, rate in [("base", base), ("trained in the dream", trained)]:
        print(f"  {name}: success {rate.successes} of {rate.episodes}, {rate}")
    production = Desk(improved, train[0])  # an object and no graph: the policy goes back by being given to it
    print(f"  back in production: {type(production.model).__name__} of {improved.model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
