"""Tasks, steps, trajectories and token segments: frozen values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from dreamgym_lg.errors import ConfigurationError, PredictionFailed, Unanswered, UserFault

Origin = Literal["real", "synthetic"]
Source = Literal["offline", "synthetic", "real"]
"""Source of an episode's answers: recorded before training, dreamed, or the real environment during training."""

Split = Literal["train", "validation", "test"]
"""Tasks of `validation` and `test` are evaluation tasks: retrieval and the curriculum never see them."""


ActKind = Literal["passed through", "blocked", "raised"]
"""Kind of an event that is no step: a tool that really ran (state tools, sub-agents, those in `pass_through`), a real access
that the guard stopped, or an exception of the agent's code that ended the episode."""

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
"""`Step.decided_by` and `Step.judged_by` in words. Other names of parts are shown as they are."""


class Drawn(TypedDict):
    """The entities of a drawn task (`draw_tasks`), and the facts that decide its outcome.

    They are the same in each of its episodes.
    """

    documents: Sequence[Sequence[Any]]
    """Initial answers of reading calls: (tool, arguments, answer)."""
    steps: Sequence[Sequence[str]]
    """The reference as (action, answer), its message last."""
    told: Sequence[str]
    """If the reference changes nothing: facts that the message has to state, in the form of `splits.words`."""
    untold: Sequence[str]
    """Facts that the message must not state, in the same form: other recorded values of these fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing for the agent to do in one world."""

    id: str
    """The same in every run for the same world."""
    instruction: str
    """The goal as judges read it. For a trace, the user's first messages."""
    environment: str
    """The environment's name, e.g. `textworld_express/peckingorder`."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The agent's input in production. Each message has `role` (system, user, assistant) and `content` (a text or LangChain's
    content blocks). Empty: the instruction as the user's message."""
    observation: str = ""
    """The first observation of a dream of this task. Empty: the instruction is the first."""
    tools: Sequence[Mapping[str, Any] | str] | None = None
    """Functions that a tool agent can call: schemas in OpenAI's form, or names alone. None: the task of a text agent."""
    rubric: str = ""
    """The criterion of success, in words. Empty: a general rubric."""
    goal: Mapping[str, Any] = field(default_factory=dict)
    """The user's goal in a conversation, hidden from the agent. Fields of `dreamgym_lg.dream.Goal`. Empty: unknown."""
    drawn: Mapping[str, Any] = field(default_factory=dict)
    """The entities and the reference of a task that was drawn from recorded ones (`Drawn`). Empty for any other."""
    seed: int | None = None
    """Seed of the world, for an environment that builds it from one."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's and the environment's own data, JSON-serialisable. Stored as it is, and never read by the library's core."""
    origin: Origin = "real"
    parent_id: str | None = None
    """Id of the task that this one is a variation of. None for any other task."""
    split: Split = "train"

    def __post_init__(self) -> None:
        for name, allowed in (("split", Split), ("origin", Origin)):  # a task of an unknown split would never be used
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
    """Further facts: `success: bool` (true only with `terminated`), `valid: bool` (the environment understood the action) and,
    in the dream, `reasoning`, `decided_by` and `judged_by` (texts, as in `Step`). Missing keys mean False, True and ""."""


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
    """The experience model's reasoning about this step. For a real step, `annotate` may have written it in hindsight."""
    decided_by: str = ""
    """Name of the part of a dream that answered (`DECIDERS`). `rules`: the environment's own rules refused the action. Empty: a
    real step, or a step without an answer."""
    judged_by: str = ""
    """Name of the judge that decided the reward. Empty: none did."""
    line: str = ""
    """Source of the call in the agent's code, `FILE:LINE in FUNCTION`. Else the tool's first line or the node's name; empty if
    unknown."""
    words: str = field(default="", repr=False)
    """For a step of a trace: the text that the agent wrote beside the call, in the same message."""


class Act(NamedTuple):
    """An event of the agent's code that is no step (`ActKind`)."""

    kind: ActKind
    after: int
    """Number of the episode's steps before it."""
    text: str
    """The call, blocked access or error. A call is written as in `Step.action`, an access like `os.remove of orders.db`."""
    answer: str = ""
    """Answer of a tool that really ran, as the policy read it."""
    line: str = ""
    """As `Step.line`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens exactly as the policy read and sampled them: one row of a training batch.

    An episode whose context only grows is one segment. Several, if the agent edits its context.
    """

    token_ids: Sequence[int]
    sampled: Sequence[int]
    """Same length: 1 for a token that the policy sampled (trainable), 0 for one that it read."""
    logprobs: Sequence[float]
    """Same length: natural-log probability under the sampling distribution; 0.0 where `sampled` is 0."""
    temperature: float | None = None
    """Sampling temperature of all its tokens; 0 is greedy. None: unknown, and refused by learners."""
    policy_version: str = ""
    """Version of the weights that sampled all its tokens, as the policy's server names it. "" without a server."""

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
    """Cause of an episode's early end (`is_missing`). None for an episode that was played to its end."""
    run: str = ""
    """Name of the training, evaluation or collection that recorded it. (run, iteration, task.id, rollout_index) is unique."""
    iteration: int = 0
    rollout_index: int = 0
    policy_version: str = ""
    experience_version: str = ""
    """Version of the dream. Empty for real episodes."""
    segments: Sequence[Segment] = ()
    annotation: Mapping[str, str] | None = None
    """`overall_plan`, `success_mode` and `failure_mode` of the whole episode, by `annotate`; None without it."""
    acts: Sequence[Act] = ()
    """Events of an unmodified agent's code that are no steps; nothing is trained on them."""
    prompt: str = ""
    """The agent's system prompt, where it was replayed through its graph (`World.as_dreamed`). Not stored."""

    @property
    def in_order(self) -> list[Step | Act]:
        """Steps and acts as they happened."""
        acts: list[tuple[float, Step | Act]] = [(act.after, act) for act in self.acts]
        steps: list[tuple[float, Step | Act]] = [(number + 0.5, step) for number, step in enumerate(self.steps)]
        return [event for _, event in sorted(acts + steps, key=itemgetter(0))]

    @property
    def has_outcome(self) -> bool:
        """False for a tool agent's episode that was cut short, or recorded without a reward."""
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

    False for outcomes of the dream, which count as no success: an unreadable answer of the experience model
    (`PredictionFailed`), a call that no responder answers (`Unanswered`), a dreamed user's fault (`UserFault`).
    """
    return error is not None and not _is_of_class(error, PredictionFailed, Unanswered, UserFault)


def is_unanswered(error: str | None) -> bool:
    """True for the error of an episode that its dream could not answer (`Unanswered`)."""
    return _is_of_class(error, Unanswered)


def lacks_answers(group: Iterable[Trajectory]) -> bool:
    """True if a call of one episode had no answer. A right solution may have none either.

    False for a drawn task: its reference is known to be answered, so that the call was a mistake of the policy.
    """
    return any(is_unanswered(episode.error) and not episode.task.drawn for episode in group)


def is_user_fault(error: str | None) -> bool:
    """True for the error of a dreamed user that contradicted its goal (`UserFault`)."""
    return _is_of_class(error, UserFault)


def _is_of_class(error: str | None, *classes: type[Exception]) -> bool:
    return error is not None and error.startswith(tuple(f"{each.__name__}:" for each in classes))
