"""Bring your own environment: the contract, its check, real episodes into the buffer, and a dream grounded in them.

Run: python cookbook/own_environment.py

A scripted chat model stands in for policy and experience model, so that this runs anywhere in a second; put any LangChain
chat model in their places. What it leaves out: training, which `dreamgym_lg/experiment/training.py` shows whole.
"""

import asyncio

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from dreamgym_lg import Dream, Environment, Model, ReplayBuffer, Task, check_environment, create_episode_graph
from dreamgym_lg.rollout import rollout
from dreamgym_lg.types import StepResult


class Door(Environment):
    """A door that has to be unlocked before it opens."""

    def reset(self, task: Task) -> str:
        self.locked, self.over = True, False
        return task.observation

    def step(self, action: str) -> StepResult:
        if self.over:
            raise RuntimeError("step after the episode's end")
        if action == "unlock door" and self.locked:
            self.locked = False
            return StepResult("The door is unlocked.", 0.5, False, False, {})
        if action == "open door" and not self.locked:
            self.over = True
            return StepResult("The door is open.", 0.5, True, False, {"success": True})
        return StepResult("Nothing happens.", 0.0, False, False, {"valid": action == "open door"})


def scripted(*replies: str) -> GenericFakeChatModel:
    return GenericFakeChatModel(messages=iter([AIMessage(reply) for reply in replies]))


def main() -> None:
    task = Task(id="door", instruction="Open the door.", environment="door", observation="A locked door.")
    check_environment(Door(), task, ["unlock door", "open door"])

    buffer = ReplayBuffer(":memory:")
    agent = create_episode_graph(scripted("unlock door", "open door"), max_steps=5).compile()
    [real] = asyncio.run(rollout(agent, [task], Door, source="real", run="cookbook", replay_buffer=buffer))
    print("real:", [(step.action, step.next_observation) for step in real.steps], "success:", real.success)

    other = Task(id="gate", instruction="Open the gate.", environment="door", observation="A locked gate.")
    model = Model(
        scripted("valid, the gate was locked\nreward 0.5, continues\nThe gate is unlocked."),
        replay_buffer=buffer,
        demonstrations=1,
    )
    print("grounded in:", [step.action for step in model.demonstrations("A locked gate.", "unlock gate", other)])
    dream = Dream([model]).create_environment()
    print("dream:", dream.reset(other), "->", dream.step("unlock gate"))


if __name__ == "__main__":
    main()
