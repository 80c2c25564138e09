"""A training script as a user writes it, for `test_tinker.py`: `gym_on_tinker.py FOLDER [KILLED]`.

With `KILLED`, the process kills itself amid the second iteration's update, between its optimiser step and the checkpoint.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from stand_in import Done, Service, Training
from tiny_models import create_model, create_tokenizer

from dreamgym_lg import DreamGym, ReplayBuffer, Task
from dreamgym_lg.integrations.tinker.policy import TinkerChatModel

CALL = '<tool_call>\n{"name": "book", "arguments": {"city": "Rome"}}\n</tool_call>'
TASKS = [Task(id=id, instruction=f"Book room {id}.", environment="rooms", split=split)
         for id, split in [("a", "train"), ("b", "train"), ("t", "test")]]  # fmt: skip
SETTINGS: dict[str, Any] = {"num_tasks": 2, "num_generations": 4, "learning_rate": 1e-2, "policy_tokens": 40}


class World(BaseChatModel):
    """A scripted experience model, and the graph's production model, which nobody asks."""

    @property
    def _llm_type(self) -> str:
        return "world"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=tools, **kwargs)

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        answer = AIMessage("valid, no progress yet\nreward 0, continues\nA dreamed room.")
        if '"episodes": [' in messages[-1].text:  # a relative judge asks
            scores = [len(each["message"]) % 11 for each in json.loads(messages[-1].text)["episodes"]]
            answer = AIMessage(json.dumps({"reason": "by length", "scores": scores}))
        return ChatResult(generations=[ChatGeneration(message=answer)])


@tool
def book(city: str) -> str:
    """Book a room."""
    return "A real room."


def odd(task: Task, state: Any) -> float:
    """A reward that differs within a group, and that has nothing to do with the task."""
    return float(len(state["messages"][-1].text) % 2)


def service(folder: Path) -> Service:
    """Tinker, which steers the first reply of an episode to be a call."""
    tokenizer = create_tokenizer(["Book a room.", CALL, "You book rooms."], vocab_size=320)
    call = [*tokenizer(CALL, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    def hook(prompt: list[int], sampled: list[int]) -> int | None:
        first = "A dreamed room" not in tokenizer.decode(prompt) and "A real room" not in tokenizer.decode(prompt)
        return call[len(sampled)] if first else None

    return Service(create_model(tokenizer, hidden_size=32, layers=1), tokenizer, folder / "tinker", hook)


def gym(folder: Path, **options: Any) -> DreamGym:
    graph = options.pop("graph", None) or create_agent(World(), [book], system_prompt="You book rooms.")
    parts = {"experience_model": World(), "tasks": TASKS, "verify_dream": odd, "verify_real": odd, **options}
    return DreamGym(graph, replay_buffer=ReplayBuffer(folder / "replay.db"), out=folder / "run", **parts)


def die_in_second_update() -> None:
    step, steps = Training.optim_step, list[Any]()

    def fatal(self: Training, params: Any) -> Done:
        done = step(self, params)
        steps.append(params)
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    Training.optim_step = fatal  # type: ignore[method-assign]


def main(folder: Path) -> DreamGym:
    policy = TinkerChatModel.from_path("tinker:tiny", service=service(folder), max_new_tokens=SETTINGS["policy_tokens"])
    trained = gym(folder)
    trained.train(policy, 2, **SETTINGS)
    trained.export(folder / "exported")
    return trained


if __name__ == "__main__":
    if sys.argv[2:]:
        die_in_second_update()
    main(Path(sys.argv[1]))
