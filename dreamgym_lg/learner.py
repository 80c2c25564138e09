"""The learner protocol, and credit: the weight and advantage of each token in the loss. Pure Python: no torch."""

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
        """Number of iterations in the weights; after a restart, in those that were saved."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the last update, also after a restart."""

    def update(self, groups: Groups) -> Mapping[str, float]:
        """Train on one iteration's groups and return metrics. `skipped` is 1 where they taught nothing."""


class TrainingRow(NamedTuple):
    """One segment with the weight and advantages of its tokens in an iteration's loss.

    The loss is the sum over all sampled tokens of all rows of `weight * loss(token, advantage)`, the KL term included. The
    sequences have one number per token of the segment; those of tokens that were read are not used.
    """

    segment: Segment
    advantages: Sequence[float]
    weight: float
    """Of each sampled token, greater than 0."""
    values: Sequence[float] = ()
    """A critic's expected reward before the token was sampled; empty without a critic."""
    returns: Sequence[float] = ()
    """The critic's target there; empty without a critic."""
    observed: Sequence[float] = ()
    """Weight of the cross-entropy of each token of an observation; 0 of all others. Empty: no observation is learned."""


def sft_row(segment: Segment, weight: float = 1.0) -> TrainingRow:
    """A row in which what was sampled is learned. Args: `weight`, of the loss of each token."""
    return TrainingRow(segment, [weight] * len(segment.token_ids), 1.0)


class Credit(Protocol):
    """Turns an iteration's groups into training rows."""

    def __call__(self, groups: Groups) -> list[TrainingRow]: ...


SAME_REWARD = 1e-6
"""Rewards that differ by no more are the same: sums of scores are rounded."""
Normalisation = Literal["episodes", "tokens"]

# --- groups -------------------------------------------------------------------------------------------------------------


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """`(r - mean) / (std + 1e-4)` over one group, zeros for a uniform one. GRPO; TRL's `scale_rewards="group"`."""
    mean = sum(rewards) / len(rewards)
    variance = sum((reward - mean) ** 2 for reward in rewards) / max(len(rewards) - 1, 1)
    return [(reward - mean) / (math.sqrt(variance) + 1e-4) for reward in rewards]


def group_credit(groups: Groups, *, normalise: Normalisation = "episodes", by_state: bool = False) -> list[TrainingRow]:
    """Training rows of GRPO: each sampled token with its episode's advantage.

    Left out are failed episodes, those without a sampled token, and uniform groups. An episode's weight is shared by its
    tokens, however it was cut into segments.

    Args:
        normalise: Weights of N episodes with T sampled tokens. `episodes`: a token of an episode with L of them weighs 1/(N L)
            (GRPO); `tokens`: 1/T (DAPO, BNPO, CISPO).
        by_state: Compare a reply with those of the group that were given to the same tokens (GiGPO, arXiv 2505.10978), if there
            are any: a reply is not blamed for what had gone wrong before it. Exact, as a group shares one world.
    """
    credited: list[tuple[Trajectory, Sequence[float]]] = []
    for group in groups:
        usable = _usable([group])
        if not is_uniform(usable):
            whole = group_advantages([episode.reward for episode in usable])
            replies = [[each] * len(_states(episode)) for episode, each in zip(usable, whole, strict=True)]
            credited += zip(usable, _by_state(usable, replies) if by_state else replies, strict=True)
    return _rows(credited, normalise)


def _by_state(group: Sequence[Trajectory], replies: Sequence[Sequence[float]]) -> list[list[float]]:
    """The advantage of each reply less the mean of those in its state. Of a state with one reply: less the last mean before."""
    at = defaultdict[Hashable, list[float]](list)
    for episode, advantages in zip(group, replies, strict=True):
        for state, advantage in zip(_states(episode), advantages, strict=True):
            at[state].append(advantage)
    changed = []
    for episode, advantages in zip(group, replies, strict=True):
        mean, own = 0.0, list[float]()
        for state, advantage in zip(_states(episode), advantages, strict=True):
            mean = fmean(at[state]) if len(at[state]) > 1 else mean
            own.append(advantage - mean)
        changed.append(own)
    return changed


def _states(episode: Trajectory) -> list[Hashable]:
    """All tokens before each reply: one state for each run of sampled tokens."""
    states, before = list[Hashable](), tuple[Hashable, ...]()
    for segment in trainable_segments(episode):
        tokens, sampled = tuple(segment.token_ids), segment.sampled
        states += [(before, tokens[:i]) for i, own in enumerate(sampled) if own and not (i and sampled[i - 1])]
        before = (*before, tokens)
    return states


def is_uniform(group: Sequence[Trajectory]) -> bool:
    """True if no two played episodes earned different rewards: no advantage, no gradient."""
    rewards = [episode.reward for episode in group if episode.error is None]
    return not rewards or max(rewards) - min(rewards) <= SAME_REWARD


def has_learning_signal(group: Sequence[Trajectory]) -> bool:
    """True if the episodes of a group that can be learned from earned different rewards."""
    return not is_uniform(_usable([group]))


def _usable(groups: Groups) -> list[Trajectory]:
    """Played episodes with a sampled token, of tasks whose right way the dream can answer."""
    known = [group for group in groups if not lacks_answers(group)]
    return [episode for group in known for episode in group if episode.error is None and _sampled_tokens(episode)]


def _rows(credited: Sequence[tuple[Trajectory, Sequence[float]]], normalise: Normalisation) -> list[TrainingRow]:
    """The rows of episodes with the advantages of their replies."""
    all_tokens = sum(_sampled_tokens(episode) for episode, _ in credited)
    rows = []
    for episode, advantages in credited:
        replies = iter(advantages)
        tokens = {"episodes": len(credited) * _sampled_tokens(episode), "tokens": all_tokens}
        for segment in trainable_segments(episode):
            runs = [(next(replies) if own else 0.0, len(list(run))) for own, run in groupby(segment.sampled)]
            rows.append(TrainingRow(segment, [a for a, size in runs for _ in range(size)], 1 / tokens[normalise]))
    return rows


def trainable_segments(episode: Trajectory) -> list[Segment]:
    """Those with a sampled token."""
    return [segment for segment in episode.segments if segment.trainable]


def _sampled_tokens(episode: Trajectory) -> int:
    return sum(segment.trainable for segment in episode.segments)


# --- observations ---------------------------------------------------------------------------------------------------------

MADE_UP = frozenset(("model", "user"))
"""`Step.decided_by` of language models. A responder of your own that asks one has to be named `model`."""
Decode = Callable[[Sequence[int]], str]


def with_observations(rows: Sequence[TrainingRow], groups: Groups, *, coefficient: float, decode: Decode) -> list[TrainingRow]:
    """The rows with observations to be predicted (ECHO, arXiv 2605.24517), `coefficient` times their mean cross-entropy."""
    marks = dict[int, list[bool]]()
    for episode in (episode for group in groups for episode in group):
        marked = observed_tokens(episode, decode)
        marks |= {id(segment): each for segment, each in zip(trainable_segments(episode), marked, strict=True)}
    weight = coefficient / max(sum(sum(marks[id(row.segment)]) for row in rows), 1)
    return [row._replace(observed=[weight * mark for mark in marks[id(row.segment)]]) for row in rows]


def observed_tokens(episode: Trajectory, decode: Decode) -> list[list[bool]]:
    """Marks the tokens of observations in each trainable segment.

    Only of those that a trace, code or reality decided, and that stand, word for word, between two replies.
    """
    steps, real, marks = list(episode.steps), episode.source == "real", list[list[bool]]()
    for segment in trainable_segments(episode):
        marked, position = [False] * len(segment.token_ids), 0
        for own, run in groupby(segment.sampled):
            begin, position = position, position + len(list(run))
            if own or not begin:  # what the first reply was given was there before
                continue
            ids = segment.token_ids[begin:position]
            few = [ids[max(i - 3, 0) : i + 1] for i in range(len(ids))]  # a character may be several tokens
            ends = list(accumulate((len(decode(each)) - len(decode(each[:-1])) for each in few), initial=0))
            for start, end in _observations(decode(ids), steps, real=real):
                for i, (before, after) in enumerate(pairwise(ends), start=begin):
                    marked[i] |= before < end and after > start
        marks.append(marked)
    return marks


def _observations(text: str, steps: list[Step], *, real: bool) -> Iterator[tuple[int, int]]:
    """Places of observations in a text, of consecutive steps. The steps up to the last one are taken off the list."""
    place, taken, doubted = 0, 0, False
    for number, step in enumerate(tuple(steps), start=1):
        words = step.next_observation.strip()
        known = step.decided_by not in MADE_UP and (bool(step.decided_by) or real)
        at = text.find(words, place) if words else -1
        if at < 0 and taken:
            break
        doubted |= at < 0 and not known  # it may be here in other words
        if at >= 0:
            place, taken = at + len(words), number
            if known and not doubted:
                yield at, place
    del steps[:taken]


# --- a critic -------------------------------------------------------------------------------------------------------------

Critic = Callable[[Sequence[Segment]], Sequence[Sequence[float]]]
"""The expected reward before each token of each segment: one number per token."""


def gae(rewards: Sequence[float], values: Sequence[float], *, gamma: float, gae_lambda: float) -> list[float]:
    """Generalised advantage estimates of one episode's actions in their order (Schulman et al. 2016, equation 16).

    `A_t = d_t + gamma lambda A_(t+1)` with `d_t = r_t + gamma V_(t+1) - V_t`; after the last action both are 0.
    """
    advantages, after, expected = list[float](), 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        after = reward + gamma * expected - value + gamma * gae_lambda * after
        expected = value
        advantages.append(after)
    return advantages[::-1]


def gae_credit(groups: Groups, *, critic: Critic, gamma: float = 1.0, gae_lambda: float = 1.0) -> list[TrainingRow]:
    """The rows of PPO: each sampled token is an action.

    The last token earns the episode's reward, and nothing is expected after it. Advantages are normalised over all tokens (mean
    0, deviation 1), each of which weighs the same. No row where all episodes earned the same.
    """
    episodes = _usable(groups)
    if is_uniform(episodes):
        return []
    segments = [segment for episode in episodes for segment in trainable_segments(episode)]
    expected = iter(critic(segments))
    values, raw = list[float](), list[float]()
    for episode in episodes:
        mine = [v for s in trainable_segments(episode) for v, own in zip(next(expected), s.sampled, strict=True) if own]
        raw += gae([0.0] * (len(mine) - 1) + [episode.reward], mine, gamma=gamma, gae_lambda=gae_lambda)
        values += mine
    mean, deviation = fmean(raw), pstdev(raw) + 1e-8
    tokens = iter([((a - mean) / deviation, v, a + v) for a, v in zip(raw, values, strict=True)])
    rows = []
    for segment in segments:
        filled = [next(tokens) if own else (0.0, 0.0, 0.0) for own in segment.sampled]
        normalised, before, returns = zip(*filled, strict=True)
        rows.append(TrainingRow(segment, normalised, 1 / len(raw), before, returns))
    return rows


# --- recorded episodes ----------------------------------------------------------------------------------------------------

MAX_WEIGHT = 20.0
"""Of an episode in advantage-weighted imitation (Peng et al. 2019)."""


def advantage_weights(returns: Sequence[float]) -> list[float]:
    """`exp(A / beta)` of each episode, at most `MAX_WEIGHT`: advantage-weighted regression (Peng et al. 2019).

    A is the return less the mean, beta the deviation of all returns, which have to differ.
    """
    mean, beta = fmean(returns), pstdev(returns)
    return [min(math.exp((each - mean) / beta), MAX_WEIGHT) for each in returns]


# --- preferences ------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Two episodes of one task, of which the first earned more."""

    chosen: Trajectory
    rejected: Trajectory
    weight: float
    """In the loss of an iteration: 1 over its number of pairs."""


def preference_pairs(groups: Groups) -> list[Pair]:
    """Pairs of every group: best and worst, second best and second worst, if they differ."""
    pairs = list[tuple[Trajectory, Trajectory]]()
    for group in groups:
        best = sorted(_usable([group]), key=lambda episode: -episode.reward)
        candidates = zip(best[: len(best) // 2], reversed(best), strict=False)
        pairs += [(chosen, rejected) for chosen, rejected in candidates if chosen.reward > rejected.reward + SAME_REWARD]
    return [Pair(chosen, rejected, 1 / len(pairs)) for chosen, rejected in pairs]


def preference_credit(pairs: Sequence[Pair], margins: Sequence[float], *, beta: float) -> list[TrainingRow]:
    """The rows of DPO, whose log-likelihood has the gradient of the loss `-log sigmoid(beta margin)`.

    That is `beta sigmoid(-beta margin)` times the log-likelihood of each token of the chosen episode, and the negative for the
    rejected one, so that no two segments need share a forward pass.

    Args: `margins`, of each pair: by how much more than the reference's the policy's log-probability of the chosen tokens
        exceeds that of the rejected ones (Rafailov et al. 2023, equation 7).
    """
    rows = []
    for (chosen, rejected, weight), margin in zip(pairs, margins, strict=True):
        advantage = beta / (1 + math.exp(min(beta * margin, 700.0)))
        for episode, signed in ((chosen, advantage), (rejected, -advantage)):
            rows += [TrainingRow(s, [signed] * len(s.token_ids), weight) for s in trainable_segments(episode)]
    return rows
