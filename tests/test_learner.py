"""The credit: what each token of an episode counts in the loss, whatever its episode was cut into."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from dreamgym_lg.learner import (
    Normalisation,
    TrainingRow,
    advantage_weights,
    gae,
    gae_credit,
    group_advantages,
    group_credit,
    has_learning_signal,
    is_uniform,
    observed_tokens,
    preference_credit,
    preference_pairs,
)
from dreamgym_lg.types import Segment, Step, Task, Trajectory


def segment(tokens: int, name: int = 7) -> Segment:
    """One given token, then `tokens` sampled ones."""
    sampled = [0] + [1] * tokens
    return Segment(token_ids=[name] * (tokens + 1), sampled=sampled, logprobs=[-1.0 * s for s in sampled], temperature=1.0)


def episode(reward: float, *segments: Segment, error: str | None = None) -> Trajectory:
    step = Step(observation="o", action="a", next_observation="p", reward=reward)
    task = Task(id="t", instruction="i", environment="e")
    return Trajectory(task=task, steps=[step], segments=segments, error=error, success=reward == 1)


def weight(rows: Sequence[TrainingRow]) -> float:
    return sum(row.weight * row.segment.trainable for row in rows)


def test_group_advantages_are_the_normalised_rewards() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == pytest.approx([0.8658754, -0.8658754, -0.8658754, 0.8658754])
    rewards = [0.0, 0.25, 1.0]
    expected = [(r - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-4) for r in rewards]
    assert group_advantages(rewards) == pytest.approx(expected)
    assert group_advantages([0.5, 0.5]) == [0.0, 0.0]
    assert group_advantages([0.5]) == [0.0]


def test_recorded_episodes_weigh_by_their_advantage() -> None:
    weights = advantage_weights([1.0, 0.0, 0.0, 1.0])
    assert weights == pytest.approx([math.e, 1 / math.e, 1 / math.e, math.e]), "a deviation above and below the mean"
    assert advantage_weights([2.0, 1.0, 1.0, 2.0]) == pytest.approx(weights), "whatever the scale of the rewards"
    assert advantage_weights([0.0] * 99 + [1.0])[-1] == 20.0, "a rare success does not weigh more than all others"


def spelled(*parts: tuple[str, int]) -> Segment:
    """Each character is a token; parts with a 1 were sampled."""
    ids = [ord(letter) for text, _ in parts for letter in text]
    sampled = [own for text, own in parts for _ in text]
    return Segment(token_ids=ids, sampled=sampled, logprobs=[0.0] * len(ids), temperature=1.0)


def read(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def marked(episode: Trajectory) -> list[str]:
    """The marked characters of each segment, runs of them apart."""
    shown = []
    for segment, marks in zip(episode.segments, observed_tokens(episode, read), strict=True):
        text = "".join(letter if mark else " " for letter, mark in zip(read(segment.token_ids), marks, strict=True))
        shown.append("|".join(text.split()))
    return shown


@pytest.mark.parametrize(
    ("decided_by", "shown"),
    [
        (("recorded", "compiled", ""), "door|lamp"),
        (("recorded", "model", ""), "door"),
        (("user", "schema", ""), "lamp"),
        (("", "recorded", ""), "lamp"),
    ],
)
def test_observations_are_marked_where_no_language_model_made_them_up(decided_by: Sequence[str], shown: str) -> None:
    segment = spelled(("<door?>", 0), ("go", 1), ("<door>", 0), ("on", 1), ("<lamp>", 0), ("end", 1))
    words = zip(("door", " lamp\n", ""), decided_by, strict=True)
    steps = [Step(observation="", action="a", next_observation=text, decided_by=by) for text, by in words]
    task = Task(id="t", instruction="i", environment="e")
    played = Trajectory(task=task, steps=steps, segments=[segment], source="synthetic")
    assert marked(played) == [shown]
    real = replace(played, source="real", steps=[replace(step, decided_by="") for step in steps])
    assert marked(real) == ["door|lamp"], "of the real environment nobody is asked"


def test_an_observation_that_may_be_made_up_text_is_not_marked() -> None:
    """Parallel calls are one reply; a refused call is no step; an agent may show an answer in other words."""

    def of(segment: Segment, *steps: tuple[str, str]) -> Trajectory:
        played = [Step(observation="", action="a", next_observation=text, decided_by=by) for text, by in steps]
        return Trajectory(task=Task(id="t", instruction="i", environment="e"), steps=played, segments=[segment])

    parallel = spelled(("?", 0), ("two", 1), ("<ok><made up: ok>", 0), ("end", 1))
    assert marked(of(parallel, ("ok", "recorded"), ("made up: ok", "model"))) == ["ok"]
    assert marked(of(parallel, ("other words", "model"), ("ok", "recorded"))) == [""], "it may stand in the other's text"
    refused = spelled(("?", 0), ("bad", 1), ("<no such tool>", 0), ("good", 1), ("<ok>", 0), ("end", 1))
    assert marked(of(refused, ("ok", "recorded"))) == ["ok"]
    two = of(spelled(("?", 0), ("one", 1)), ("ok", "recorded"), ("yes", "recorded"))
    segments = [*two.segments, spelled(("?ok", 0), ("two", 1), ("<yes>", 0), ("end", 1))]
    assert marked(replace(two, segments=segments)) == ["", "yes"], "what a segment begins with was there before"


def test_uniform_groups_give_no_rows() -> None:
    uniform = [episode(1.0, segment(2)) for _ in range(3)]
    mixed = [episode(float(i), segment(2)) for i in range(3)]
    assert group_credit([uniform, uniform]) == []
    assert group_credit([uniform, mixed]) == group_credit([mixed]), "nor do they dilute the others"
    assert len(group_credit([mixed])) == 3


def test_a_group_with_a_call_that_the_dream_could_not_answer_teaches_nothing() -> None:
    """Else whoever did not ask would be preferred."""
    asked = episode(0.0, segment(2), error="Unanswered: no responder of the dream answers get_visit")
    mixed = [episode(1.0, segment(2)), episode(0.0, segment(2))]
    critic = lambda segments: [[0.5] * len(each.token_ids) for each in segments]  # noqa: E731
    assert group_credit([[*mixed, asked]]) == gae_credit([[*mixed, asked]], critic=critic) == []
    assert preference_pairs([[*mixed, asked]]) == [] and preference_pairs([mixed])
    assert group_credit([mixed, [*mixed, asked]]) == group_credit([mixed])


def test_of_a_drawn_task_a_call_without_an_answer_costs_its_own_episode_alone() -> None:
    """Its reference was answered to the end: most groups of a compiled dream were lost by one wrong id."""
    asked = episode(0.0, segment(2), error="Unanswered: no responder of the dream answers get_visit")
    played = [episode(1.0, segment(2)), episode(0.0, segment(2)), asked]
    group = [replace(each, task=replace(each.task, drawn={"steps": [["a", "b"]]})) for each in played]
    assert len(group_credit([group])) == 2 and [row.advantages for row in group_credit([group])] == [
        row.advantages for row in group_credit([played[:2]])
    ]
    assert has_learning_signal(group) and not has_learning_signal(played) and not has_learning_signal(group[1:])


def test_rewards_that_differ_by_rounding_are_uniform() -> None:
    def scores(*rewards: float) -> Trajectory:
        steps = [Step(observation="o", action="a", next_observation="p", reward=reward) for reward in rewards]
        return replace(episode(0.0, segment(3)), steps=steps)

    group = [scores(0.1, 0.2, 0.7), scores(1.0), scores(0.3, 0.3, 0.4), scores(1 - 1e-8)]
    assert [each.reward for each in group[:3]] == [1.0, 1.0, 1.0]
    assert is_uniform(group) and group_credit([group]) == [] and preference_pairs([group]) == []
    assert gae_credit([group], critic=lambda segments: [[0.5] * len(each.token_ids) for each in segments]) == []
    assert not is_uniform([scores(0.99), scores(1.0)]) and is_uniform([])


def test_failed_episodes_are_left_out_of_the_group() -> None:
    failed = episode(9.0, segment(2, 9), error="PredictionFailed: unreadable")
    rows = group_credit([[episode(0.0, segment(2, 0)), failed, episode(1.0, segment(2, 1))]])
    assert [row.segment.token_ids[0] for row in rows] == [0, 1]
    assert [row.advantages[-1] for row in rows] == pytest.approx(group_advantages([0.0, 1.0]))
    assert weight(rows) == pytest.approx(1)
    assert group_credit([[failed, episode(0.0, segment(2)), episode(0.0, segment(2))]]) == []
    assert group_credit([[episode(0.0, segment(2)), episode(1.0)]]) == [], "an episode without tokens cannot be compared"


@pytest.mark.parametrize("normalise", ["episodes", "tokens"])
def test_the_weight_of_an_episode_does_not_depend_on_its_number_of_segments(normalise: Normalisation) -> None:
    whole = group_credit([[episode(0.0, segment(6)), episode(1.0, segment(12))]], normalise=normalise)
    parts = [segment(1), segment(4), segment(0), segment(7)]
    divided = group_credit([[episode(0.0, segment(6)), episode(1.0, *parts)]], normalise=normalise)
    assert [row.segment.trainable for row in divided] == [6, 1, 4, 7], "no row without a token to train on"
    assert weight(divided[1:]) == pytest.approx(weight(whole[1:]))
    assert divided[0] == whole[0]
    assert [advantage for row in divided for advantage in set(row.advantages[1:])] == [
        row.advantages[-1] for row in (whole[0], *[whole[1]] * 3)
    ]
    assert all(len(row.advantages) == len(row.segment.token_ids) for row in divided)


def played(reward: float, *replies: int) -> Trajectory:
    """One segment: each reply is a token, and the environment answers 100 more than it."""
    ids = [1, *(token for reply in replies for token in (reply, 100 + reply))]
    sampled = [int(0 < token < 100) for token in [0, *ids[1:]]]
    return episode(reward, Segment(token_ids=ids, sampled=sampled, logprobs=[-1.0 * own for own in sampled], temperature=1.0))


@pytest.mark.parametrize("seed", range(5))
def test_by_state_a_reply_is_compared_with_those_to_the_same_tokens(seed: int) -> None:
    """Against a plain reading of the rule, on random episodes."""
    random = Random(seed)
    replies = [[random.choice((2, 3)) for _ in range(random.randint(1, 4))] for _ in range(8)]
    group = [played(random.random(), *each) for each in replies]
    whole = group_advantages([each.reward for each in group])
    rows = group_credit([group], by_state=True)
    for own, advantage, row in zip(replies, whole, rows, strict=True):
        mean = 0.0
        for turn in range(len(own)):
            same = [whole[i] for i, other in enumerate(replies) if len(other) > turn and other[:turn] == own[:turn]]
            mean = statistics.fmean(same) if len(same) > 1 else mean
            assert row.advantages[1 + 2 * turn] == pytest.approx(advantage - mean)
    assert [row.weight for row in rows] == [row.weight for row in group_credit([group])]


def test_by_state_nobody_is_blamed_for_what_had_gone_wrong_before() -> None:
    wrong = [played(0.0, 2, 4), played(0.0, 2, 5)]
    rows = group_credit([[*wrong, played(1.0, 3, 4), played(0.0, 3, 5)]], by_state=True)
    assert [row.advantages[3] for row in rows] == pytest.approx([0, 0, 1, -1], abs=1e-3)
    assert [row.advantages[1] for row in rows] == pytest.approx(group_advantages([0.0, 0.0, 1.0, 0.0]))


def test_what_the_weights_amount_to() -> None:
    group = [episode(0.0, segment(6)), episode(1.0, segment(12)), episode(1.0, segment(2), segment(2))]
    assert [row.weight for row in group_credit([group])] == pytest.approx([1 / 18, 1 / 36, 1 / 12, 1 / 12])
    assert [row.weight for row in group_credit([group], normalise="tokens")] == pytest.approx([1 / 22] * 4)


# --- a critic ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (1.0, 0.0), (0.9, 0.7)])
def test_gae_is_the_discounted_sum_of_the_deltas(gamma: float, gae_lambda: float) -> None:
    rng = Random(0)
    rewards, values = [[rng.gauss(0, 1) for _ in range(9)] for _ in range(2)]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, [*values[1:], 0.0], strict=True)]
    expected = [sum((gamma * gae_lambda) ** (k - t) * deltas[k] for k in range(t, 9)) for t in range(9)]
    assert gae(rewards, values, gamma=gamma, gae_lambda=gae_lambda) == pytest.approx(expected)


def test_an_episode_is_one_sequence_of_actions_whatever_it_was_cut_into() -> None:
    """Observations within and between segments carry no action: nothing is discounted over them, no value of theirs is read."""
    rng = Random(1)
    mixed = Segment(token_ids=[1] * 7, sampled=[0, 1, 1, 0, 0, 1, 0], logprobs=[0.0] * 7, temperature=1.0)
    other = segment(4)
    values = {id(s): [rng.gauss(0, 1) for _ in s.token_ids] for s in (mixed, other)}
    told = segment(2)
    values[id(told)] = [math.nan, 0.5, 0.25]
    critic = lambda segments: [values[id(s)] for s in segments]  # noqa: E731
    groups = [[episode(1.0, mixed, other)], [episode(0.0, told)]]
    rows = gae_credit(groups, critic=critic, gamma=0.9, gae_lambda=0.8)
    own = [v for s in (mixed, other) for v, sampled in zip(values[id(s)], s.sampled, strict=True) if sampled]
    raw = gae([0.0] * 6 + [1.0], own, gamma=0.9, gae_lambda=0.8) + gae([0.0, 0.0], [0.5, 0.25], gamma=0.9, gae_lambda=0.8)
    mean, deviation = statistics.mean(raw), statistics.pstdev(raw)
    normalised = [(a - mean) / deviation for a in raw]
    found = [[x for row in rows for x, s in zip(column(row), row.segment.sampled, strict=True) if s] for column in COLUMNS]
    assert found[0] == pytest.approx(normalised)
    assert found[1] == pytest.approx([*own, 0.5, 0.25])
    assert found[2] == pytest.approx([a + v for a, v in zip(raw, [*own, 0.5, 0.25], strict=True)])
    assert [row.weight for row in rows] == pytest.approx([1 / 9] * 3)
    assert all(len(row.advantages) == len(row.values) == len(row.returns) == len(row.segment.token_ids) for row in rows)
    assert [x for x, s in zip(rows[0].advantages, mixed.sampled, strict=True) if not s] == [0.0] * 4


COLUMNS = (lambda row: row.advantages, lambda row: row.values, lambda row: row.returns)


def test_episodes_that_all_earned_the_same_teach_a_critic_nothing() -> None:
    def critic(_: Sequence[Segment]) -> list[list[float]]:
        raise AssertionError("nobody needs it")

    assert gae_credit([[episode(1.0, segment(2))], [episode(1.0, segment(3))]], critic=critic) == []


# --- preferences ----------------------------------------------------------------------------------------------------------


def test_the_best_is_paired_with_the_worst_and_the_second_best_with_the_second_worst() -> None:
    rewards = [0.5, 0.0, 1.0, 0.25, 0.5]
    pairs = preference_pairs([[episode(reward, segment(1, i)) for i, reward in enumerate(rewards)]])
    assert [(p.chosen.reward, p.rejected.reward) for p in pairs] == [(1.0, 0.0), (0.5, 0.25)]
    assert [p.weight for p in pairs] == [0.5, 0.5]
    equal = [episode(1.0, segment(1)), episode(1.0, segment(2)), episode(0.0, segment(3)), episode(1.0, segment(4))]
    assert len(preference_pairs([equal])) == 1, "of the others, none is better"
    assert preference_pairs([equal[:2]]) == []
    failed = episode(0.0, segment(1), error="PredictionFailed: unreadable")
    assert preference_pairs([[episode(1.0, segment(1)), failed, episode(0.0)]]) == []


@pytest.mark.parametrize("margin", [-3.0, 0.0, 2.0, 1e5, -1e5])
def test_preference_credit_is_the_derivative_of_the_dpo_loss(margin: float) -> None:
    pairs = preference_pairs([[episode(1.0, segment(2, 1), segment(1, 2)), episode(0.0, segment(3, 3))]])
    rows = preference_credit(pairs, [margin], beta=0.1)
    loss = lambda m: math.log1p(math.exp(-0.1 * m)) if m > -1000 else -0.1 * m  # noqa: E731
    slope = (loss(margin + 1e-4) - loss(margin - 1e-4)) / 2e-4
    assert [row.segment.token_ids[0] for row in rows] == [1, 2, 3]
    assert [set(row.advantages) for row in rows] == [{rows[0].advantages[0]}] * 2 + [{-rows[0].advantages[0]}]
    assert rows[0].advantages[0] == pytest.approx(-slope, abs=1e-6)
