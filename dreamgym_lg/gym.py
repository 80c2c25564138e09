"""`DreamGym`: an unmodified LangGraph agent, trained in the dream and handed back. The facade over all parts."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args
from uuid import uuid4

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.dream import Dream, Model, TraceIndex
from dreamgym_lg.dream.annotate import Annotate
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment import choice, evaluation, gate
from dreamgym_lg.experiment.advice import Advice
from dreamgym_lg.experiment.agent_arguments import check_tasks
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.experiment.experience_models import is_local_model, model_name, policy_version
from dreamgym_lg.experiment.experiment import Experiment
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.workspace import logger
from dreamgym_lg.fidelity.judgement import Judgement
from dreamgym_lg.hosted import is_on_tinker
from dreamgym_lg.learner import LearnerName
from dreamgym_lg.production.export import export_policy, is_export_of
from dreamgym_lg.production.provenance import provenance
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.report.proof import claims
from dreamgym_lg.rollout import check_played, rollout
from dreamgym_lg.simulate import with_policy
from dreamgym_lg.simulate.doctor import Examination
from dreamgym_lg.splits import split_tasks
from dreamgym_lg.statistics import Rate, clustered_rate
from dreamgym_lg.tasks import is_tool_task
from dreamgym_lg.types import Split, Task, Trajectory

if TYPE_CHECKING:
    from dreamgym_lg.experiment.supervised import StartModel
    from dreamgym_lg.integrations.gepa.learner import ImprovedPrompts


_MIN_TASKS_TO_SPLIT = 10
"""Number of traced tasks below which none is held out."""
_EXPERIMENT_OPTIONS = ("policy", "create_learner", "engine", "report_to", "progress")


class DreamGym:
    """Trains the policy of an unmodified LangGraph agent in a dream.

    It runs an `Experiment` (`gym.experiment`, with its folder, models and stages) on an `AgentWorld` (`gym.world`).

    Args:
        graph: The compiled graph of production, or its path, `"my_app.py:graph"` (`AgentWorld`).
        replay_buffer: Real traces (`load_traces`); they ground the dream.
        experience_model: The language model that answers calls that no trace answers, and judges: a `Model`, any chat model, or
            a name like `openai:gpt-5.4-mini`. None: the local one that `train_experience` trains.
        dream: A `Dream` of your own parts, in place of the usual one (`AgentWorld.create_dream`).
        tasks: Tasks to train on, and evaluation tasks of the splits `validation` and `test`. If there is no training task but
            drawn ones, the buffer's real training tasks of the same environments are added. Default: all real tasks of the
            buffer. If none is an evaluation task, a fifth is kept for validation (`split_tasks`) and, without `dream` and
            drawn tasks, a fifth for the proof.
        out: Folder of checkpoints, models and reports. Another folder is another training.
        settings: Default: `AgentWorld.settings`.
        say: Called with every warning and one-line result. Default: a logged warning.
        options: Arguments of `Experiment`: `policy`, `create_learner`, `engine`, `report_to`, `progress`. All others are of
            `AgentWorld`: `payload`, `verify_dream`, `verify_real`, `reset_real`, `writes`, `task_generator`, `isolation`, ...

    Raises `ConfigurationError` as `AgentWorld` does, and for an `experience_model` beside a `dream`.
    """

    def __init__(
        self,
        graph: Any,
        *,
        replay_buffer: ReplayBuffer,
        experience_model: Model | BaseChatModel | str | None = None,
        dream: Dream | None = None,
        tasks: Sequence[Task] = (),
        out: str | Path = "runs/gym",
        settings: Settings | None = None,
        say: Callable[[str], None] = logger.warning,
        **options: Any,
    ) -> None:
        if not isinstance(replay_buffer, ReplayBuffer):
            raise ConfigurationError(f"replay_buffer={replay_buffer!r} is no ReplayBuffer; give ReplayBuffer(path)")
        for name, value, kind in (("dream", dream, Dream), ("settings", settings, Settings)):
            if value is not None and not isinstance(value, kind):
                raise ConfigurationError(f"{name}={value!r} is no {kind.__name__}: give {name}={kind.__name__}(...)")
        if dream is not None and experience_model is not None:
            raise ConfigurationError("dream= brings its own parts: leave experience_model= away, or put it into the dream")
        arguments: dict[str, Any] = {"replay_buffer": replay_buffer, "experience_model": experience_model, "say": say}
        arguments |= {name: options.pop(name) for name in _EXPERIMENT_OPTIONS if name in options}
        self.world = AgentWorld(graph, tasks=tasks, dream=dream, **options)
        self.replay_buffer = replay_buffer
        stored = replay_buffer.tasks(origin="real")
        self.experiment = Experiment(self.world, out, settings, **arguments)
        traced = _traced_tasks(self.world.all_tasks, stored, say)
        if self.experiment.stored_settings() is None:
            tasks = self.world.all_tasks
            # a compiled dream and drawn tasks come from all traces: a proof on tasks of these would not be held out
            proof = dream is None and not any(task.drawn for task in tasks)
            traced = _with_held_out(tasks, traced, replay_buffer, say, proof=proof)
        self.world.add_traced(traced)
        self._store_tasks(stored)
        if experience_model is not None:
            self.experiment.experience()  # report a wrong one now

    def _store_tasks(self, stored: Sequence[Task]) -> None:
        """Store all tool tasks with the agent's tool schemas, which traces lack."""
        ids = {task.id for task in self.world.all_tasks}
        traced = (self.world.with_tools(task) for task in stored if is_tool_task(task) and task.id not in ids)
        self.replay_buffer.add_tasks([*self.world.all_tasks, *traced])
        if self.world.writes is not None:
            self.world.writing_tools(self.replay_buffer)  # raises for a name that no tool has
        dream = self.world.dream
        for part in (*dream.responders, *dream.judges) if dream is not None else ():
            if isinstance(index := getattr(part, "index", None), TraceIndex):
                index.refresh()  # likewise

    def tasks(self, split: Split) -> list[Task]:
        """The tasks of a split, from `tasks=` and the traces. Raises `ConfigurationError` for an unknown split."""
        if split not in get_args(Split):
            raise ConfigurationError.unknown("split", split, get_args(Split))
        return self.experiment.tasks(split)

    def examine(self) -> Examination:
        """The graph's parts and how a dream handles each, as `dreamgym doctor` shows it."""
        return self.world.examine(self.replay_buffer.trajectories(source="offline", split="train", errors=False))

    # --- the stages, as of `Experiment` -----------------------------------------------------------------------------------

    def prepare(self, model: "StartModel" = None, *, baselines: Sequence[str] | None = None) -> None:
        """`train_experience` if the dream needs it, `train_base` and the other `baselines` (`Experiment.prepare`)."""
        self.experiment.prepare(model, baselines=baselines)

    def train_experience(self, model: "StartModel" = None, *, annotator: BaseChatModel | Annotate | str | None = None) -> None:
        """Fine-tune a local experience model on the traces (`Experiment.train_experience`)."""
        self.experiment.train_experience(model, annotator=annotator)

    def train_user(self, model: "StartModel" = None, *, goals: BaseChatModel | str | None = None) -> None:
        """Fine-tune a local user on the users of the traces (`Experiment.train_user`)."""
        self.experiment.train_user(model, goals=goals)

    def train_base(self, model: "StartModel" = None) -> None:
        """Fine-tune the policy on every recorded success (`Experiment.train_base`)."""
        self.experiment.train_base(model)

    def advise(self, learner: LearnerName | None = None) -> Advice:
        """Say whether to train, to collect more traces, or to stop at imitation (`Experiment.advise`)."""
        return self.experiment.advise(learner)

    def train(self, policy: "BaseChatModel | str | Path | None" = None, iterations: int | None = None, **options: Any) -> Any:
        """Train the policy in the place that `Settings.environment` names, and return it.

        The policy decides the learner, which is reported: `tinker:MODEL` is trained on Tinker, local weights here. Any other
        hosted model, the agent's own for instance, needs `reflection=`: its prompts are improved.

        Args: `options`, of `Experiment.train`; with `learner="gepa"`, of `improve_prompts`, whose result is returned.
        """
        if "learner" not in options and "reflection" in options:
            name = "the agent's own model" if policy is None else model_name(policy)
            if not (hasattr(policy, "tokenizer") or is_local_model(name) or is_on_tinker(name)):
                options["learner"] = "gepa"
                self.experiment.say(f"learner gepa: the weights of {name} are elsewhere")
        if iterations is not None:
            options["iterations"] = iterations
        if options.get("learner") == "gepa":
            return self.improve_prompts(policy=policy, **{name: options[name] for name in options if name != "learner"})
        return self.experiment.train(cast(Any, policy), **options)

    def improve_prompts(self, **options: Any) -> "ImprovedPrompts":
        """Improve the agent's system messages and tool descriptions in the dream, by GEPA.

        Args:
            reflection: The chat model that reads episodes and writes new texts, or its name.
            policy: The chat model that acts, or its name. Default: the agent's only one.
            episodes: Maximum dreamed episodes, default 300. Those read from the replay buffer on resumption count.
            hosted: Limits and prices of both models, and of a `Model` that shares it. Calls under way may exceed a token limit.
            texts: The texts to improve, by name. Default: those that `dreamgym doctor` lists.
            force: Continue even if the gate refuses the dream; its reasons are only reported.

        Raises `ConfigurationError` without one model, texts or tasks, and `BudgetExceeded` if the original prompts spend it.
        """
        from dreamgym_lg.integrations.gepa.learner import improve_prompts

        return improve_prompts(self, **options)

    def fidelity(self, *, limit: int = gate.LIMIT) -> Judgement:
        """The dream's verdicts on recorded episodes, as the gate before training sees them (`Experiment.fidelity`)."""
        return self.experiment.fidelity(limit=limit)

    def prove(self, baselines: Sequence[str] = ()) -> dict[str, Any]:
        """Evaluate every policy on held-out tasks, real and dreamed (`Experiment.prove`). Reports the claims."""
        result = self.experiment.prove(baselines)
        for claim in claims(result):
            self.experiment.say(f"{claim['sentence']}. {claim['verdict']}")
        return result

    def evaluate(self, policy: BaseChatModel | None = None, **settings: Any) -> tuple[Rate, list[Trajectory]]:
        """`aevaluate` for synchronous code."""
        return run_lasting(self.aevaluate(policy, **settings))

    async def aevaluate(
        self,
        policy: BaseChatModel | None = None,
        *,
        real: bool = False,
        tasks: Sequence[Task] | None = None,
        run: str | None = None,
        num_generations: int = 1,
        concurrency: int = 16,
        seed: int = 0,
    ) -> tuple[Rate, list[Trajectory]]:
        """Success with its 95 % interval, and the episodes. In the dream or, with `real`, on the graph's own tools.

        The rate is over all episodes, clustered by task (`clustered_rate`). A failing episode is played again, twice at most,
        unless the guard or the wall stopped it (`AccessBlocked`). A dreamed episode that ended in an unreadable answer of the
        experience model (its `error` begins with `PredictionFailed`) counts as no success.

        Args:
            policy: Any chat model. Default: the trained policy; before a training the best baseline.
            tasks: Default: those of the split `test`, or of `validation` if there are none.
            run: Name that the episodes are stored under; with the same name an evaluation resumes. Default: a new one.

        Raises `ConfigurationError` without a policy or tasks, for an object that is no `Task`, and with `real` if nothing
        verifies the outcome; `EpisodesMissing` if episodes could not be played: the error says how to play only these again.
        """
        work = self.experiment
        work.check_settings()
        acting = policy or work.trained_policy() or work.kept_policy()
        if acting is None:
            raise ConfigurationError("there is no policy to evaluate: pass one, or train first")
        check_tasks(tasks or ())
        held_out = self.tasks("test") or self.tasks("validation")
        tasks = [self.world.with_tools(task) for task in tasks] if tasks is not None else held_out
        if not tasks:
            raise ConfigurationError(
                "no task has the split 'test' or 'validation', and evaluation needs tasks never trained on: give "
                "tasks=[Task(..., split='test'), ...], or dataclasses.replace(task, split='test') for some of them"
            )
        kind, dream = ("real", None) if real else ("dream", work.dream())
        name = run or f"evaluate-{_label(acting)}-{uuid4().hex[:8]}"
        agent, create_environment = work.players(acting, dream)
        episodes = await rollout(
            agent,
            tasks,
            create_environment,
            num_generations=num_generations,
            source="real" if real else "synthetic",
            seed=seed,
            concurrency=concurrency,
            attempts=3,
            run=work.run_name(f"{name}/{kind}"),
            replay_buffer=self.replay_buffer,
            policy_version=policy_version(acting),
            experience_version=dream.version if dream is not None else "",
        )
        check_played(episodes, again=f"evaluate(..., run={name!r})")
        evaluation.say_unreadable(work, episodes)
        rate = clustered_rate((episode.task.id, episode.success) for episode in episodes)
        assert rate is not None  # there is a task
        return rate, episodes

    def export(self, path: str | Path | None = None, policy: BaseChatModel | None = None, *, overwrite: bool = False) -> Any:
        """The graph for production, its own tools and the trained policy in it (`with_policy`).

        Args:
            path: A new folder to write the policy to (`export_policy`): weights, manifest, model card, and a project that
                `langgraph dev` starts, which serves the agent if it has a path.
            policy: Default: the trained one, or the baseline that `prove` found to be as good; before a training the best
                baseline.
            overwrite: Replace an exported policy in that folder. The same one is replaced anyway: only its card may be new.

        Raises `ConfigurationError` without a policy, for a folder that exists, and for an agent that is an object but no graph:
        create that one again with the policy as its model.
        """
        served: Any = policy or self.experiment.kept_policy()
        if served is None:
            raise ConfigurationError(f"no policy to export: {choice.no_policy(self.experiment)}, or pass one")
        options = {key: value for key, value in self.world.options.items() if key in ("route", "pass_through")}
        graph = with_policy(self.world.graph, served, **options)
        if path is not None:
            origin = provenance(self.experiment, served)
            overwrite = overwrite or is_export_of(Path(path), served, origin)  # so that a finished script runs again
            export_policy(served, path, provenance=origin, agent=self.world.source, overwrite=overwrite)
        return graph


def _label(policy: BaseChatModel) -> str:
    """Name and mode of a policy, such as `base-greedy`."""
    name = Path(model_name(policy)).name
    return f"{name}-greedy" if getattr(policy, "temperature", None) == 0 else f"{name}-sampled"


def _traced_tasks(tasks: Sequence[Task], stored: Sequence[Task], say: Callable[[str], None]) -> list[Task]:
    """The tasks of the traces that a gym adds to `tasks`.

    All without other tasks than drawn ones. The training tasks if no other task than drawn ones is to be trained on."""
    if all(task.drawn for task in tasks):  # true of no tasks
        return list(stored)
    ids, environments = {task.id for task in tasks}, {task.environment for task in tasks}
    traced = [task for task in stored if task.id not in ids]
    if traced and (unknown := environments - {task.environment for task in stored}):
        say(
            f"tasks of the environment {min(unknown)!r} are given, and the traces are of {traced[0].environment!r}: what was "
            "recorded there neither answers nor judges here; give Task and load_traces the same environment="
        )
    training = [task for task in traced if task.split == "train" and task.environment in environments]
    if not any(task.split == "train" and not task.drawn for task in tasks):
        return training
    if training:
        say(f"{len(training)} training tasks of the traces are not in tasks=: imitated where they succeed, never played")
    return []


def _with_held_out(
    tasks: Sequence[Task], traced: list[Task], replay_buffer: ReplayBuffer, say: Callable[[str], None], *, proof: bool
) -> list[Task]:
    """The traces' tasks. Some become evaluation tasks, also in the buffer, unless there are any.

    Args: `proof`, as for `_split`.
    """
    training = [task for task in traced if task.split == "train" and is_tool_task(task)]
    if any(task.split != "train" for task in (*tasks, *traced)):
        return traced
    if len(training) < _MIN_TASKS_TO_SPLIT:
        if sum(not task.drawn for task in tasks) >= _MIN_TASKS_TO_SPLIT:
            say("no task is held out, and nothing validates or proves a training: split_tasks(tasks) holds some out")
        return traced
    try:
        split = _split(training, proof)
        replay_buffer.add_tasks([task for task in split if task.split != "train"])
    except ConfigurationError as error:
        say(f"no task is held out: {error}")
        return traced
    number = Counter(task.split for task in split)
    last = "for the proof" if proof else "for the proof (hold out before you draw tasks or compile a world: split_tasks)"
    say(
        f"no task is held out: of the traces' {len(training)}, {number['validation']} are for validation now and "
        f"{number['test']} {last}, and not trained on"
    )
    return [*split, *(task for task in traced if not is_tool_task(task))]


def _split(tasks: Sequence[Task], proof: bool) -> list[Task]:
    """Hold out a fifth for validation. With `proof`, another fifth if more than half are left to train on."""
    if proof:
        with suppress(ConfigurationError):
            split = split_tasks(tasks, validation=0.2, test=0.2)
            if 2 * sum(task.split == "train" for task in split) > len(split):
                return split
    return split_tasks(tasks, validation=0.2, test=0)
