"""`DreamGym`: an unmodified LangGraph agent, trained in the dream and handed back. The facade over all parts."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.curriculum.curriculum import Curriculum
from dreamgym_lg.environment import CreateEnvironment
from dreamgym_lg.errors import ConfigurationError, MissingDependency
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experience.model import DreamEnvironment, ExperienceModel
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import check_played, rollout
from dreamgym_lg.simulate import SimulatedAgent, with_policy
from dreamgym_lg.simulate.agent import Verify
from dreamgym_lg.simulate.doctor import Examination, examine
from dreamgym_lg.simulate.episode import Episode
from dreamgym_lg.statistics import Rate, wilson
from dreamgym_lg.types import Source, Split, Task, Trajectory

_OPTIONS = set(inspect.signature(Episode).parameters) - {"graph", "policy", "environment", "task"}


class DreamGym:
    """Trains the policy of a LangGraph agent as it is: no line of it changes, and nothing real is touched.

    Args:
        graph: The compiled graph of production, or any object with `invoke` that runs one.
        replay_buffer: Real traces (`load_traces`); they ground the dream.
        experience_model: Who plays the tools: an `ExperienceModel`, any chat model, or a name like `openai:gpt-5-mini`.
        tasks: What to train on. Tasks of the splits `validation` and `test` are for `evaluate` alone. Default: the real
            tasks of the buffer.
        payload: The graph's input for a task; by default its instruction as a human message.
        verify: (task, final state) -> reward, 0 to 1, a success if it is 1. Without it the experience model judges the final
            answer by `task.metadata["rubric"]`.
        verify_real: The same for `evaluate(real=True)`, where what the tools really did can be asked. Default: `verify`.
        create_environment: Creates the world of one episode, in place of the experience model's dream; its episodes are
            recorded as real ones.
        options: `select`, `pass_through`, `simulate_nodes`, `allow`, `respond` and `recursion_limit` of `simulated`.

    Raises `ConfigurationError` if something in the graph could leak (`examine` says what, and what to do), and for arguments
    of a wrong kind.
    """

    def __init__(
        self, graph: Any, *, replay_buffer: ReplayBuffer, experience_model: ExperienceModel | BaseChatModel | str,
        tasks: Sequence[Task] = (), payload: Callable[[Task], Any] | None = None, verify: Verify | None = None,
        verify_real: Verify | None = None, create_environment: CreateEnvironment | None = None, **options: Any,
    ) -> None:  # fmt: skip
        if not isinstance(replay_buffer, ReplayBuffer):
            raise ConfigurationError(f"replay_buffer={replay_buffer!r} is no ReplayBuffer; give ReplayBuffer(path)")
        for name in sorted(set(options) - _OPTIONS):
            raise ConfigurationError.unknown("option of DreamGym", name, _OPTIONS)
        for name in ("pass_through", "simulate_nodes"):
            if isinstance(options.get(name), str):
                raise ConfigurationError(f"{name}={options[name]!r}: give a list of names")
        for name, given in {"payload": payload, "verify": verify, "verify_real": verify_real}.items():
            if given is not None and not callable(given):
                raise ConfigurationError(f"{name}={given!r} is no function; DreamGym's docstring says what it is given")
        for task in tasks:
            if not isinstance(task, Task):
                raise ConfigurationError(f"tasks holds {task!r}; each has to be a Task")
        self.graph, self.replay_buffer, self.payload, self.options = graph, replay_buffer, payload, options
        self.verify, self.verify_real = verify, verify_real or verify
        if leaks := [finding for finding in self.examine().findings if finding.fate == "could leak"]:
            told = "; ".join(f"{finding.kind} {finding.name}: {finding.advice}" for finding in leaks)
            raise ConfigurationError(f"this graph could touch the real world from a dream, where no guard sees it: {told}")
        self.experience = to_experience(experience_model, replay_buffer)
        self.create_environment = create_environment or partial(DreamEnvironment, self.experience)
        self.source: Source = "real" if create_environment else "synthetic"
        """Who answers in `train` and in `evaluate(real=False)`."""
        self.tasks = list(tasks) or replay_buffer.tasks(origin="real")
        replay_buffer.add_tasks(self.tasks)
        self.policy: Any = None
        self.run = ""
        """Under this name the newest training's episodes and metrics are in the replay buffer; "" before one."""

    def examine(self) -> Examination:
        """What the graph is made of and what a dream makes of it, as `dreamgym doctor` shows it."""
        names = {key: self.options[key] for key in ("pass_through", "simulate_nodes") if key in self.options}
        return examine(self.graph, **names)

    def agent(self, policy: BaseChatModel, *, real: bool = False) -> SimulatedAgent:
        """The graph with `policy` in it, as `rollout` plays it: in the dream or, with `real`, on its own tools."""
        verify = self.verify_real if real else self.verify
        return SimulatedAgent(self.graph, policy, payload=self.payload, verify=verify, real=real, **self.options)

    def train(
        self, policy: Any, iterations: int, *, out: str | Path = "runs/gym", num_tasks: int = 8, num_generations: int = 8,
        concurrency: int = 64, seed: int = 0, on_node: Callable[[str, int], None] = lambda node, iteration: None,
        **learner: Any,
    ) -> Any:  # fmt: skip
        """Train a policy in the dream with TRL's GRPO, and return it.

        Durable: killed at any moment, the same call goes on; with more `iterations`, a finished training goes on too.

        Args:
            policy: A `LocalChatModel`, or the path or hub name of one: the weights that training begins with.
            iterations: How many there shall be in all; each plays `num_tasks` times `num_generations` episodes.
            out: Folder of the checkpoints. Another folder is another training.
            on_node: Told the name and iteration of each node of the training graph as it begins.
            learner: Further arguments of `GRPOLearner` (`learning_rate`, `beta`, ...).

        Raises `ConfigurationError` without a training task, `NothingToTrain` if the episodes give nothing to learn from,
        `MissingDependency` without the extra `train`.
        """
        from dreamgym_lg.graphs.training import Training, run_training
        from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
        from dreamgym_lg.integrations.trl.grpo import GRPOLearner

        tasks = self._split("train")
        if not tasks:
            raise ConfigurationError("there is no task of the split 'train': pass tasks=, or import traces first")
        if not isinstance(policy, LocalChatModel | str | Path):
            raise ConfigurationError(f"policy={policy!r} cannot be trained; give a LocalChatModel, or a path or name of one")
        local = policy if isinstance(policy, LocalChatModel) else LocalChatModel.from_path(policy, max_new_tokens=512)
        if local.model is None:
            raise ConfigurationError("the policy has a process of its own, which trains nothing: load it without own_process")
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        run = _run_name(folder)
        same: Any = {"num_generations": num_generations, "seed": seed}
        trainer = GRPOLearner(local.model, local.tokenizer, folder / "policy", **same, **learner)
        try:
            local.weights_changed()  # those of a checkpoint may be in place now
            training = Training(
                policy=local, agent=self.agent(local), learner=trainer, source=self.source,
                experience=self.experience if self.source == "synthetic" else None,
                create_environment=self.create_environment, curriculum=Curriculum(tasks, synthetic_share=0, seed=seed),
                replay_buffer=self.replay_buffer, weights_changed=local.weights_changed, num_tasks=num_tasks,
                concurrency=concurrency, on_node=on_node, **same,
            )  # fmt: skip
            run_training(training, folder / "training.db", run=run, iterations=iterations)
        finally:
            trainer.close()
        self.policy, self.run = local, run
        return local

    def evaluate(self, policy: BaseChatModel | None = None, **settings: Any) -> tuple[Rate, list[Trajectory]]:
        """As `aevaluate`, waited for."""
        return run_lasting(self.aevaluate(policy, **settings))

    async def aevaluate(
        self, policy: BaseChatModel | None = None, *, real: bool = False, tasks: Sequence[Task] | None = None,
        run: str | None = None, num_generations: int = 1, concurrency: int = 16, seed: int = 0,
    ) -> tuple[Rate, list[Trajectory]]:  # fmt: skip
        """Success with its 95 % Wilson interval, and the episodes: in the dream or, with `real`, on the graph's own tools.

        The rate is over all episodes: one that could not be played is played again, twice at most. In a dream, an episode
        that ended in an unreadable answer of the experience model (its `error` begins with `PredictionFailed`) is no success.

        Args:
            policy: Any chat model; default: the trained policy.
            tasks: Default: those of the split `test`, or of `validation` if there are none.
            run: Under which name the episodes are stored; the same name goes on where it was. Default: a new one.

        Raises `ConfigurationError` without a policy, without tasks, and with `real` if nothing verifies the outcome;
        `EpisodesMissing` if episodes still could not be played: the error says how only these are played again.
        """
        wanted = policy or self.policy
        if wanted is None:
            raise ConfigurationError("there is no policy to evaluate: pass one, or train first")
        chosen = list(tasks) if tasks is not None else self._split("test") or self._split("validation")
        if not chosen:
            raise ConfigurationError(
                "no task has the split 'test' or 'validation', and evaluation needs tasks never trained on: give "
                "tasks=[Task(..., split='test'), ...], or dataclasses.replace(task, split='test') for some of them"
            )
        kind, name = "real" if real else "dream", run or f"evaluate-{uuid4().hex[:8]}"
        source: Source = "real" if real else self.source
        episodes = await rollout(
            self.agent(wanted, real=real), chosen, None if real else self.create_environment,
            num_generations=num_generations, source=source, seed=seed, concurrency=concurrency, attempts=3,
            run=f"{name}/{kind}", replay_buffer=self.replay_buffer,
            experience_version=self.experience.version if source == "synthetic" else "",
        )  # fmt: skip
        check_played(episodes, again=f"evaluate(..., run={name!r})")
        successes = sum(episode.success for episode in episodes)
        return Rate(successes, len(episodes), *wilson(successes, len(episodes))), episodes

    def export(self, path: str | Path | None = None, policy: BaseChatModel | None = None) -> Any:
        """The graph for production, its own tools and the trained policy in it; with `path`, the policy is saved there too.

        Raises `ConfigurationError` without a policy, and for an agent that is an object and no graph: make that one anew
        with the policy as its model.
        """
        wanted: Any = policy or self.policy
        if wanted is None:
            raise ConfigurationError("there is no policy to export: pass one, or train first")
        if path is not None:
            from dreamgym_lg.integrations.trl.sft import save_model

            if getattr(wanted, "model", None) is None or not hasattr(wanted, "tokenizer"):
                raise ConfigurationError(f"{type(wanted).__name__} has no weights to save; export it without a path")
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            save_model(wanted.model, wanted.tokenizer, Path(path))
        kept = {key: self.options[key] for key in ("select", "pass_through") if key in self.options}
        return with_policy(self.graph, wanted, **kept)

    def _split(self, split: Split) -> list[Task]:
        return [task for task in self.tasks if task.split == split]


def _run_name(folder: Path) -> str:
    """The name of the training in this folder; a new one for a new folder, whose episodes must not be taken from an old one."""
    file = folder / "run"
    if not file.exists():
        file.write_text(f"{folder.name}-{uuid4().hex[:8]}")
    return file.read_text()


def to_experience(model: ExperienceModel | BaseChatModel | str, replay_buffer: ReplayBuffer) -> ExperienceModel:
    """An experience model from whatever names one: a name needs `langchain` and the provider's package."""
    if isinstance(model, ExperienceModel):
        return model
    if isinstance(model, str):
        try:
            from langchain.chat_models import init_chat_model
        except ImportError as error:
            raise MissingDependency(f"experience_model={model!r} needs: pip install langchain langchain-<provider>") from error
        try:
            model = init_chat_model(model, temperature=0)
        except Exception as error:  # each provider has its own way to say that a key is missing
            raise ConfigurationError(f"experience_model={model!r}: {error}") from error
    if not isinstance(model, BaseChatModel):
        raise ConfigurationError(f"experience_model={model!r} is no chat model; give one, its name, or an ExperienceModel")
    return ExperienceModel(model, replay_buffer=replay_buffer, demonstrations=3)
