"""Tasks, steps, trajectories and token segments: frozen values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from dreamgym_lg.errors import ConfigurationError, PredictionFailed, Unanswered, UserFault

Origin = Literal["real", "synthetic"]
Source = Literal["offline", "synthetic", "real"]
"""Of the answers: recorded before training, dreamed, or of the real environment during training."""

Split = Literal["train", "validation", "test"]
"""`validation` and `test` tasks are evaluation tasks: retrieval and the curriculum never see them."""


ActKind = Literal["passed through", "blocked", "raised"]
"""Kind of an event beside the steps. A tool that really ran (state tools, sub-agents, those in `pass_through`), a real access
that the guard stopped, or an exception of the agent's own that ended the episode."""

TRACES = "traces"
"""Run name of imported conversations (`load_traces`)."""
IMPUTED = "imputed"
"""Name of the responder `Imputed` of compiled worlds."""
DECIDERS: Mapping[str, str] = {
    "schema": "the tool's argument schema",
    "recorded": "a recorded answer",
    IMPUTED: "a recorded state of another entity",
    "references": "a recorded success's writing calls",
    "verify": "your own check",
    "model": "the experience model",
    "user": "the user",
    "rules": "the world's own rules",
}
"""`Step.decided_by` and `Step.judged_by` in words; parts of other names stand for themselves."""


class Drawn(TypedDict):
    """The entities of a drawn task (`draw_tasks`), and the facts that decide its outcome.

    They are the same in each of its episodes.
    """

    documents: Sequence[Sequence[Any]]
    """What reading calls return first: tool, arguments, answer."""
    steps: Sequence[Sequence[str]]
    """Actions of the reference, its message last, and their answers."""
    told: Sequence[str]
    """Where the reference changes nothing: what the message has to tell, in the form of `splits.words`."""
    untold: Sequence[str]
    """The same of what it must not tell: other recorded values of these fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing for the agent to do in one world."""

    id: str
    """Stable over runs: the same world has the same id."""
    instruction: str
    """The goal, as judges read it; of a trace the user's first messages."""
    environment: str
    """The environment's name, e.g. `textworld_express/peckingorder`."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The agent's input as production gave it. Each message has `role` (system, user, assistant) and `content` (a text or
    LangChain's content blocks). Empty: the instruction as the user's message."""
    observation: str = ""
    """The first observation, where a dream of this task begins; empty: at the instruction."""
    tools: Sequence[Mapping[str, Any] | str] | None = None
    """Functions that an agent with tools can call. Their schemas in OpenAI's form, or names alone. None: no tool task."""
    rubric: str = ""
    """How success is judged, in words; empty: by a general rubric."""
    goal: Mapping[str, Any] = field(default_factory=dict)
    """The user's goal in a conversation, which no agent is shown. Fields of `dreamgym_lg.dream.Goal`. Empty: unknown."""
    drawn: Mapping[str, Any] = field(default_factory=dict)
    """The entities and the reference of a task that was drawn from recorded ones (`Drawn`). Empty for any other."""
    seed: int | None = None
    """Of the world, where its environment builds it from one."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's and the environment's own data, JSON-serialisable. Stored as it is, and never read by the library's core."""
    origin: Origin = "real"
    parent_id: str | None = None
    """The task this one was varied from; None for a task nobody varied."""
    split: Split = "train"

    def __post_init__(self) -> None:
        for name, allowed in (("split", Split), ("origin", Origin)):  # a task of no known split would take part in nothing
            if (value := getattr(self, name)) not in get_args(allowed):
                raise ConfigurationError.unknown(f"{name} of task {self.id!r}:", str(value), get_args(allowed))


class StepResult(NamedTuple):
    """An environment's answer to one action: Gymnasium's five values, the observation being text."""

    observation: str
    reward: float
    """The change of the task's score, so that an episode's rewards sum to its score."""
    terminated: bool
    """The task itself ended, in success or failure."""
    truncated: bool
    """The episode was cut short by a step limit; never true together with `terminated`."""
    info: Mapping[str, Any]
    """Further facts. `success: bool` (true only with `terminated`), `valid: bool` (the environment understood the action) and,
    in the dream, `reasoning`, `decided_by` and `judged_by` (`str`, as of `Step`). Absent keys read as False, True and ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One transition of a trajectory."""

    observation: str
    """The text before the action."""
    action: str
    next_observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    valid: bool = True
    reasoning: str = ""
    """The experience model's reasoning about this step. Of a real one, written in hindsight by `annotate`, else empty."""
    decided_by: str = ""
    """Name of the part of a dream that answered (`DECIDERS`). `rules`: the environment's own rules refused the action. Empty: a
    real step, or nobody was asked."""
    judged_by: str = ""
    """Name of the judge that decided the reward; empty where none did."""
    line: str = ""
    """The line of the agent's code that made the call, `FILE:LINE in FUNCTION`. Or the tool's first line, or the node's name;
    empty where there is none."""
    words: str = field(default="", repr=False)
    """Of a trace: what the agent said beside the call, in the same message."""


class Act(NamedTuple):
    """A deed of an agent's code beside its steps, or what stopped it."""

    kind: ActKind
    after: int
    """How many steps of the episode were before it."""
    text: str
    """The call, blocked access or error. A call is as `Step.action` has it, an access as `os.remove of orders.db`."""
    answer: str = ""
    """The answer of a tool that passed through, as the policy read it."""
    line: str = ""
    """As `Step.line`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens exactly as the policy read and sampled them: one row of a training batch.

    An episode whose context only grows is one segment; an agent that edits its context gives several.
    """

    token_ids: Sequence[int]
    sampled: Sequence[int]
    """Same length: 1 where the policy sampled the token (trainable), 0 where it was given."""
    logprobs: Sequence[float]
    """Same length: natural-log probability under the sampling distribution; 0.0 where `sampled` is 0."""
    temperature: float | None = None
    """At which all its tokens were sampled; 0 is greedy. None: unknown, and taken by no learner."""
    policy_version: str = ""
    """Version of the weights that sampled all its tokens, by the policy's server. "" where no server samples."""

    @property
    def trainable(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(self.sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A recorded episode, or the record of one that failed (`error` is set)."""

    task: Task
    steps: Sequence[Step] = ()
    source: Source = "offline"
    success: bool = False
    error: str | None = None
    """Cause of an episode's early end (`is_missing`). None for a played one, whatever its outcome."""
    run: str = ""
    """Name of the training, evaluation or collection that recorded it. (run, iteration, task.id, rollout_index) is unique."""
    iteration: int = 0
    rollout_index: int = 0
    policy_version: str = ""
    experience_version: str = ""
    """Empty when the real environment answered."""
    segments: Sequence[Segment] = ()
    annotation: Mapping[str, str] | None = None
    """`overall_plan`, `success_mode` and `failure_mode` of the whole episode by `annotate`; None before."""
    acts: Sequence[Act] = ()
    """Deeds of an unmodified agent's code beside its steps; nothing is trained on them."""
    prompt: str = ""
    """The agent's system prompt, where it was replayed through its graph (`World.as_dreamed`). Not stored."""

    @property
    def in_order(self) -> list[Step | Act]:
        """Steps and acts as they happened."""
        acts, ordered = list(self.acts), list[Step | Act]()
        for number, step in enumerate([*self.steps, None]):
            while acts and (step is None or acts[0].after <= number):
                ordered.append(acts.pop(0))
            ordered += [step] if step is not None else []
        return ordered

    @property
    def has_outcome(self) -> bool:
        """False if the outcome is unknown. So are a tool agent's episodes that were cut short, or recorded without a reward."""
        return self.task.tools is None or (bool(self.steps) and not self.steps[-1].truncated)

    @property
    def reward(self) -> float:
        """Sum of the steps' rewards, to nine digits: the episode's score."""
        return round(fsum(step.reward for step in self.steps), 9)

    @property
    def invalid_actions(self) -> int:
        return sum(not step.valid for step in self.steps)


def is_missing(error: str | None) -> bool:
    """True for the error of an episode that could not be played.

    An experience model's unreadable answer (`PredictionFailed`) is no such error, but an outcome of the dream, and no success;
    nor is a dreamed user's fault, or an answer that no responder knows.
    """
    names = (PredictionFailed.__name__, Unanswered.__name__, UserFault.__name__)
    return error is not None and not error.startswith(tuple(f"{name}:" for name in names))


def is_unanswered(error: str | None) -> bool:
    """True for the error of an episode that its dream could not answer (`Unanswered`)."""
    return error is not None and error.startswith(f"{Unanswered.__name__}:")


def lacks_answers(group: Iterable["Trajectory"]) -> bool:
    """True if a call of one episode had no answer.

    The right way may have none either. Never of a drawn task: its reference was answered to the end, and the call was the
    policy's own wrong turn.
    """
    return any(is_unanswered(episode.error) and not episode.task.drawn for episode in group)


def is_user_fault(error: str | None) -> bool:
    """True for the error of a dreamed user that contradicted its goal (`UserFault`)."""
    return error is not None and error.startswith(f"{UserFault.__name__}:")
