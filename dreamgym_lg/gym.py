"""`DreamGym`: an unmodified LangGraph agent, trained in the dream and handed back. The facade over all parts."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.curriculum import Curriculum
from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience import DreamEnvironment, ExperienceModel
from dreamgym_lg.replay import ReplayBuffer
from dreamgym_lg.rollout import Environments, rollout
from dreamgym_lg.simulate import SimulatedAgent, with_policy
from dreamgym_lg.simulate.agent import Verify
from dreamgym_lg.simulate.doctor import Examination, examine
from dreamgym_lg.statistics import Rate
from dreamgym_lg.types import Task, Trajectory


class DreamGym:
    """Trains the policy of a LangGraph agent as it is: no line of it changes, and nothing real is touched.

    Args:
        graph: The compiled graph of production, or any object with `invoke` that runs one.
        replay_buffer: Real traces (`load_traces`); they ground the dream.
        experience_model: Who plays the tools: an `ExperienceModel`, any chat model, or a name like `openai:gpt-5-mini`.
        tasks: What to train on. Tasks of the splits `validation` and `test` are for `evaluate` alone. Default: the buffer's.
        payload: The graph's input for a task; by default its instruction as a human message.
        verify: (task, final state) -> reward, 0 to 1. Without it the experience model judges the final answer by
            `task.metadata["rubric"]`.
        environments: Lends the world of one episode in place of the experience model's dream.
        options: `select`, `pass_through`, `simulate_nodes`, `allow`, `respond` and `recursion_limit` of `simulated`.

    Raises `ConfigurationError` if something in the graph could leak (`examine` says what, and what to do).
    """

    def __init__(
        self, graph: Any, *, replay_buffer: ReplayBuffer, experience_model: ExperienceModel | BaseChatModel | str,
        tasks: Sequence[Task] = (), payload: Callable[[Task], Any] | None = None, verify: Verify | None = None,
        environments: Environments | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.graph, self.replay_buffer, self.payload, self.verify = graph, replay_buffer, payload, verify
        self.options = options
        self.experience = to_experience(experience_model, replay_buffer)
        self.environments = environments or partial(self._dream, self.experience)
        replay_buffer.add_tasks(tasks)
        self.tasks = list(tasks) or replay_buffer.tasks(origin="real")
        self.policy: Any = None
        if leaks := [finding for finding in self.examine().findings if finding.fate == "could leak"]:
            told = "; ".join(f"{finding.kind} {finding.name}: {finding.advice}" for finding in leaks)
            raise ConfigurationError(f"this graph could touch the real world from a dream, where no guard sees it: {told}")

    def examine(self) -> Examination:
        """What the graph is made of and what a dream makes of it, as `dreamgym doctor` shows it."""
        names = {key: self.options[key] for key in ("pass_through", "simulate_nodes") if key in self.options}
        return examine(self.graph, **names)

    @staticmethod
    def _dream(experience: ExperienceModel) -> Any:
        return nullcontext(DreamEnvironment(experience))

    def agent(self, policy: BaseChatModel, *, real: bool = False) -> SimulatedAgent:
        """The graph with `policy` in it, as `rollout` plays it: in the dream or, with `real`, on its own tools."""
        return SimulatedAgent(self.graph, policy, payload=self.payload, verify=self.verify, real=real, **self.options)

    def train(
        self, policy: Any, iterations: int, *, out: str | Path = "runs/gym", num_tasks: int = 8, num_generations: int = 8,
        seed: int = 0, on_node: Callable[[str, int], None] = lambda node, iteration: None, **learner: Any,
    ) -> Any:  # fmt: skip
        """Train a policy in the dream with TRL's GRPO, and return it. Durable: the same call goes on after a crash.

        Args: `policy`, a `LocalChatModel`, or the path or hub name of one; `learner`, further arguments of `GRPOLearner`
        (`learning_rate`, `beta`, ...). Needs the extra `train`.
        """
        from langgraph.checkpoint.sqlite import SqliteSaver

        from dreamgym_lg.graphs.training import Training, create_training_graph
        from dreamgym_lg.integrations.transformers import LocalChatModel
        from dreamgym_lg.integrations.trl.grpo import GRPOLearner

        self.policy = policy if isinstance(policy, BaseChatModel) else LocalChatModel.from_path(policy, max_new_tokens=512)
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        trainer = GRPOLearner(
            self.policy.model, self.policy.tokenizer, folder / "policy", num_generations=num_generations, seed=seed, **learner
        )
        training = Training(
            policy=self.policy, agent=self.agent(self.policy), learner=trainer, experience=self.experience,
            environments=self.environments, curriculum=Curriculum(self._split("train"), synthetic_share=0, seed=seed),
            replay_buffer=self.replay_buffer, num_tasks=num_tasks, num_generations=num_generations, seed=seed,
            weights_changed=self.policy.weights_changed, on_node=on_node,
        )  # fmt: skip
        try:
            with SqliteSaver.from_conn_string(str(folder / "training.db")) as saver:
                graph = create_training_graph(training).compile(checkpointer=saver)
                config: Any = {"configurable": {"thread_id": "train"}, "recursion_limit": 1_000_000}
                begun = graph.get_state(config).values
                graph.invoke(None if begun else {"run": str(folder), "iterations": iterations}, config, durability="sync")
        finally:
            trainer.close()
        return self.policy

    def evaluate(
        self, policy: BaseChatModel | None = None, *, real: bool = False, run: str = "evaluate", num_generations: int = 1,
        concurrency: int = 16,
    ) -> tuple[Rate, list[Trajectory]]:  # fmt: skip
        """Success on the evaluation tasks with its Wilson interval, and the episodes: in the dream, or `real` on its tools."""
        wanted = policy or self.policy
        if wanted is None:
            raise ConfigurationError("there is no policy to evaluate: pass one, or train first")
        tasks = self._split("test") or self._split("validation")
        if not tasks:
            raise ConfigurationError("no task has the split 'test' or 'validation': evaluation needs tasks never trained on")
        none: Callable[[], Any] = lambda: nullcontext(None)  # noqa: E731
        episodes = asyncio.run(
            rollout(
                self.agent(wanted, real=real), tasks, none if real else self.environments, context=_context,
                num_generations=num_generations, source="real" if real else "synthetic", run=run, concurrency=concurrency,
                replay_buffer=self.replay_buffer,
            )  # fmt: skip
        )
        played = [episode for episode in episodes if episode.error is None]
        return Rate(sum(episode.success for episode in played), len(played)), episodes

    def export(self, path: str | Path | None = None, policy: BaseChatModel | None = None) -> Any:
        """The graph for production, its own tools and the trained policy in it; with `path`, the policy is saved there too."""
        wanted: Any = policy or self.policy
        if wanted is None:
            raise ConfigurationError("there is no policy to export: pass one, or train first")
        if path is not None:
            from dreamgym_lg.integrations.trl.sft import save_model

            Path(path).parent.mkdir(parents=True, exist_ok=True)
            save_model(wanted.model, wanted.tokenizer, Path(path))
        return with_policy(self.graph, wanted, select=self.options.get("select"))

    def _split(self, split: str) -> list[Task]:
        return [task for task in self.tasks if task.split == split]


def _context(environment: Environment) -> Any:
    return SimpleNamespace(environment=environment)


def to_experience(model: ExperienceModel | BaseChatModel | str, replay_buffer: ReplayBuffer) -> ExperienceModel:
    """An experience model from whatever names one: a name needs `langchain` and the provider's package."""
    if isinstance(model, ExperienceModel):
        return model
    if isinstance(model, str):
        try:
            from langchain.chat_models import init_chat_model
        except ImportError as error:
            raise ConfigurationError(f"experience_model={model!r} needs: pip install langchain langchain-<provider>") from error
        model = init_chat_model(model, temperature=0)
    known = replay_buffer.count("steps") > 0
    return ExperienceModel(model, replay_buffer=replay_buffer, demonstrations=3 if known else 0)
