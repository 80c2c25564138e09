"""The learner protocol, and credit assignment: each token's weight and advantage in the loss. No torch."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from statistics import fmean, pstdev
from typing import Literal, NamedTuple, Protocol

from dreamgym_lg.types import Segment, Step, Trajectory, lacks_answers

LearnerName = Literal["grpo", "ppo", "dpo", "rft", "tinker"]
"""The learners by name; classes are in `integrations.trl.learners`, `integrations.tinker.learner`, `experiment.rejection`."""

Groups = Sequence[Sequence[Trajectory]]
"""The episodes of an iteration, those of one task together."""


class Learner(Protocol):
    """Trains the policy on recorded episodes, durably, e.g. `integrations.trl.learners.GRPOLearner`."""

    @property
    def iteration(self) -> int:
        """Number of iterations in the weights; after a restart, in the saved weights."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the last update, also after a restart."""

    def update(self, groups: Groups) -> Mapping[str, float]:
        """Train on one iteration's groups and return metrics. `skipped` is 1 if nothing was learned from them."""


class TrainingRow(NamedTuple):
    """One segment with the weight and advantages of its tokens in an iteration's loss.

    The loss is the sum over all sampled tokens of all rows of `weight * loss(token, advantage)`, the KL term included. Each
    sequence has one number per token of the segment; numbers of tokens that were not sampled are ignored.
    """

    segment: Segment
    advantages: Sequence[float]
    weight: float
    """Weight of each sampled token, greater than 0."""
    values: Sequence[float] = ()
    """The critic's expected reward before each token; empty without a critic."""
    returns: Sequence[float] = ()
    """The critic's target before each token; empty without a critic."""
    observed: Sequence[float] = ()
    """Weight of each token's cross-entropy: greater than 0 for tokens of observations, else 0. Empty: none is learned."""


def sft_row(segment: Segment, weight: float = 1.0) -> TrainingRow:
    """A row for supervised training on the sampled tokens. Args: `weight`, of each token's loss."""
    return TrainingRow(segment, [weight] * len(segment.token_ids), 1.0)


Credit = Callable[[Groups], list[TrainingRow]]
"""Turns an iteration's groups into training rows."""
REWARD_TOLERANCE = 1e-6
"""Largest difference between rewards that count as equal, as sums of scores have rounding errors."""
Normalisation = Literal["episodes", "tokens"]

# --- groups -------------------------------------------------------------------------------------------------------------


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """`(r - mean) / (std + 1e-4)` over one group, zeros for a uniform one. GRPO; TRL's `scale_rewards="group"`."""
    mean = sum(rewards) / len(rewards)
    variance = sum((reward - mean) ** 2 for reward in rewards) / max(len(rewards) - 1, 1)
    return [(reward - mean) / (math.sqrt(variance) + 1e-4) for reward in rewards]


def group_credit(groups: Groups, *, normalise: Normalisation = "episodes", by_state: bool = False) -> list[TrainingRow]:
    """Training rows of GRPO: each sampled token with its episode's advantage.

    Failed episodes, episodes without a sampled token, and uniform groups are left out. An episode's tokens share its weight
    equally, however it was cut into segments.

    Args:
        normalise: Weights of N episodes with T sampled tokens. `episodes`: a token of an episode with L of them weighs 1/(N L)
            (GRPO); `tokens`: 1/T (DAPO, BNPO, CISPO).
        by_state: Compare each reply with the group's replies to the same tokens, if there are any (GiGPO, arXiv 2505.10978), so
            that a reply is not blamed for earlier mistakes. States match exactly, as a group shares one world.
    """
    credited: list[tuple[Trajectory, Sequence[float]]] = []
    for group in groups:
        usable = _usable([group])
        if not is_uniform(usable):
            per_episode = group_advantages([episode.reward for episode in usable])
            per_reply = [[value] * len(_states(episode)) for episode, value in zip(usable, per_episode, strict=True)]
            credited += zip(usable, _center_by_state(usable, per_reply) if by_state else per_reply, strict=True)
    return _rows(credited, normalise)


def _center_by_state(group: Sequence[Trajectory], per_reply: Sequence[Sequence[float]]) -> list[list[float]]:
    """Subtract its state's mean from each reply's advantage. A state with one reply takes the last mean before."""
    at = defaultdict[Hashable, list[float]](list)
    for episode, advantages in zip(group, per_reply, strict=True):
        for state, advantage in zip(_states(episode), advantages, strict=True):
            at[state].append(advantage)
    centered = []
    for episode, advantages in zip(group, per_reply, strict=True):
        mean, differences = 0.0, list[float]()
        for state, advantage in zip(_states(episode), advantages, strict=True):
            mean = fmean(at[state]) if len(at[state]) > 1 else mean
            differences.append(advantage - mean)
        centered.append(differences)
    return centered


def _states(episode: Trajectory) -> list[Hashable]:
    """All tokens before each reply: one state for each run of sampled tokens."""
    states, before = list[Hashable](), tuple[Hashable, ...]()
    for segment in trainable_segments(episode):
        tokens, sampled = tuple(segment.token_ids), segment.sampled
        states += [(before, tokens[:i]) for i, one in enumerate(sampled) if one and not (i and sampled[i - 1])]
        before = (*before, tokens)
    return states


def is_uniform(group: Sequence[Trajectory]) -> bool:
    """True if all played episodes earned the same reward: no advantage, no gradient."""
    rewards = [episode.reward for episode in group if episode.error is None]
    return not rewards or max(rewards) - min(rewards) <= REWARD_TOLERANCE


def has_learning_signal(group: Sequence[Trajectory]) -> bool:
    """True if a group's usable episodes earned different rewards."""
    return not is_uniform(_usable([group]))


def _usable(groups: Groups) -> list[Trajectory]:
    """Played episodes with a sampled token, without groups that lack answers (`lacks_answers`)."""
    answered = [group for group in groups if not lacks_answers(group)]
    return [episode for group in answered for episode in group if episode.error is None and _sampled_tokens(episode)]


def _rows(credited: Sequence[tuple[Trajectory, Sequence[float]]], normalise: Normalisation) -> list[TrainingRow]:
    """The rows of episodes with the advantages of their replies."""
    all_tokens = sum(_sampled_tokens(episode) for episode, _ in credited)
    rows = []
    for episode, advantages in credited:
        replies = iter(advantages)
        tokens = {"episodes": len(credited) * _sampled_tokens(episode), "tokens": all_tokens}
        for segment in trainable_segments(episode):
            runs = [(next(replies) if sampled else 0.0, len(list(run))) for sampled, run in groupby(segment.sampled)]
            rows.append(TrainingRow(segment, [a for a, size in runs for _ in range(size)], 1 / tokens[normalise]))
    return rows


def trainable_segments(episode: Trajectory) -> list[Segment]:
    """The episode's segments with a sampled token."""
    return [segment for segment in episode.segments if segment.trainable]


def _sampled_tokens(episode: Trajectory) -> int:
    return sum(segment.trainable for segment in episode.segments)


# --- observations ---------------------------------------------------------------------------------------------------------

MODEL_DECIDERS = frozenset(("model", "user"))
"""`Step.decided_by` of answers that a language model wrote. A responder of your own that asks one must be named `model`."""
Decode = Callable[[Sequence[int]], str]


def with_observations(rows: Sequence[TrainingRow], groups: Groups, *, coefficient: float, decode: Decode) -> list[TrainingRow]:
    """Add the loss on observations to rows: `coefficient` times their mean cross-entropy (ECHO, arXiv 2605.24517)."""
    marks = dict[int, list[bool]]()
    for episode in (episode for group in groups for episode in group):
        marked = observed_tokens(episode, decode)
        marks |= {id(segment): each for segment, each in zip(trainable_segments(episode), marked, strict=True)}
    weight = coefficient / max(sum(sum(marks[id(row.segment)]) for row in rows), 1)
    return [row._replace(observed=[weight * mark for mark in marks[id(row.segment)]]) for row in rows]


def observed_tokens(episode: Trajectory, decode: Decode) -> list[list[bool]]:
    """Mark, in each trainable segment, the tokens of observations that can be learned.

    These come from a trace, code or reality, and stand word for word between two replies.
    """
    steps, real, marks = list(episode.steps), episode.source == "real", list[list[bool]]()
    for segment in trainable_segments(episode):
        marked, position = [False] * len(segment.token_ids), 0
        for sampled, run in groupby(segment.sampled):
            begin, position = position, position + len(list(run))
            if sampled or not begin:  # the prompt of the first reply holds no answer to a call
                continue
            ids = segment.token_ids[begin:position]
            windows = [ids[max(i - 3, 0) : i + 1] for i in range(len(ids))]  # a character may be several tokens
            ends = list(accumulate((len(decode(each)) - len(decode(each[:-1])) for each in windows), initial=0))
            for start, end in _observations(decode(ids), steps, real=real):
                for i, (before, after) in enumerate(pairwise(ends), start=begin):
                    marked[i] |= before < end and after > start
        marks.append(marked)
    return marks


def _observations(text: str, steps: list[Step], *, real: bool) -> Iterator[tuple[int, int]]:
    """(start, end) of the observations of consecutive steps in a text. Removes the steps up to the last one from `steps`."""
    end, consumed, ambiguous = 0, 0, False
    for number, step in enumerate(tuple(steps), start=1):
        words = step.next_observation.strip()
        reliable = step.decided_by not in MODEL_DECIDERS and (bool(step.decided_by) or real)
        start = text.find(words, end) if words else -1
        if start < 0 and consumed:
            break
        ambiguous |= start < 0 and not reliable  # it may be here in other words
        if start >= 0:
            end, consumed = start + len(words), number
            if reliable and not ambiguous:
                yield start, end
    del steps[:consumed]


# --- a critic -------------------------------------------------------------------------------------------------------------

Critic = Callable[[Sequence[Segment]], Sequence[Sequence[float]]]
"""Segments -> the expected reward before each token, one number per token."""


def gae(rewards: Sequence[float], values: Sequence[float], *, gamma: float, gae_lambda: float) -> list[float]:
    """Generalised advantage estimates of one episode's actions in their order (Schulman et al. 2016, equation 16).

    `A_t = d_t + gamma lambda A_(t+1)` with `d_t = r_t + gamma V_(t+1) - V_t`; `A` and `V` are 0 after the last action.
    """
    advantages, advantage, next_value = list[float](), 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * next_value - value + gamma * gae_lambda * advantage
        next_value = value
        advantages.append(advantage)
    return advantages[::-1]


def gae_credit(groups: Groups, *, critic: Critic, gamma: float = 1.0, gae_lambda: float = 1.0) -> list[TrainingRow]:
    """Training rows of PPO: each sampled token is an action.

    The last token earns the episode's reward. Advantages are normalised over all tokens (mean 0, deviation 1), and all tokens
    have the same weight. No rows if all episodes earned the same.
    """
    episodes = _usable(groups)
    if is_uniform(episodes):
        return []
    segments = [segment for episode in episodes for segment in trainable_segments(episode)]
    expected = iter(critic(segments))
    values, raw = list[float](), list[float]()
    for episode in episodes:
        own = [v for s in trainable_segments(episode) for v, one in zip(next(expected), s.sampled, strict=True) if one]
        raw += gae([0.0] * (len(own) - 1) + [episode.reward], own, gamma=gamma, gae_lambda=gae_lambda)
        values += own
    mean, deviation = fmean(raw), pstdev(raw) + 1e-8
    tokens = iter([((a - mean) / deviation, v, a + v) for a, v in zip(raw, values, strict=True)])
    rows = []
    for segment in segments:
        numbers = [next(tokens) if sampled else (0.0, 0.0, 0.0) for sampled in segment.sampled]
        advantages, segment_values, returns = zip(*numbers, strict=True)
        rows.append(TrainingRow(segment, advantages, 1 / len(raw), segment_values, returns))
    return rows


# --- recorded episodes ----------------------------------------------------------------------------------------------------

MAX_WEIGHT = 20.0
"""Largest weight of an episode in advantage-weighted imitation (Peng et al. 2019)."""


def advantage_weights(returns: Sequence[float]) -> list[float]:
    """`exp(A / beta)` of each episode, at most `MAX_WEIGHT`: advantage-weighted regression (Peng et al. 2019).

    A is the return minus the mean, beta the standard deviation of all returns, which must not all be equal.
    """
    mean, beta = fmean(returns), pstdev(returns)
    return [min(math.exp((each - mean) / beta), MAX_WEIGHT) for each in returns]


# --- preferences ------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Two episodes of one task; the chosen one earned more."""

    chosen: Trajectory
    rejected: Trajectory
    weight: float
    """Weight in the loss: 1 / number of pairs in the iteration."""


def preference_pairs(groups: Groups) -> list[Pair]:
    """Pairs of every group: best and worst, second best and second worst, if rewards differ."""
    pairs = list[tuple[Trajectory, Trajectory]]()
    for group in groups:
        ranked = sorted(_usable([group]), key=lambda episode: -episode.reward)
        candidates = zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False)
        pairs += [(chosen, rejected) for chosen, rejected in candidates if chosen.reward > rejected.reward + REWARD_TOLERANCE]
    return [Pair(chosen, rejected, 1 / len(pairs)) for chosen, rejected in pairs]


def preference_credit(pairs: Sequence[Pair], margins: Sequence[float], *, beta: float) -> list[TrainingRow]:
    """Training rows of DPO. Their weighted log-likelihood has the gradient of `-log sigmoid(beta margin)`.

    The weight is `beta sigmoid(-beta margin)` for each token of the chosen episode, and its negative for the rejected one, so
    that no two segments have to share a forward pass.

    Args: `margins`, of each pair: log-probability of the chosen minus that of the rejected tokens, by the policy, minus the
        same by the reference (Rafailov et al. 2023, equation 7).
    """
    rows = []
    for (chosen, rejected, weight), margin in zip(pairs, margins, strict=True):
        advantage = beta / (1 + math.exp(min(beta * margin, 700.0)))
        for episode, signed_advantage in ((chosen, advantage), (rejected, -advantage)):
            rows += [TrainingRow(s, [signed_advantage] * len(s.token_ids), weight) for s in trainable_segments(episode)]
    return rows
