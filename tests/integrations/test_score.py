"""The score of a text game in a dream: partial credit, and exactly 1 for a task that is done."""

import pytest

from dreamgym_lg.dream import Answer, Episode, Verdict
from dreamgym_lg.integrations.text_games.game import Score
from dreamgym_lg.types import Step, Task, Trajectory

TASK = Task(id="t", instruction="eat", environment="kitchen")


def played(*rewards: float) -> Trajectory:
    """An episode whose experience model gives these rewards, and calls the last step a success."""
    steps: list[Step] = []
    for number, reward in enumerate(rewards, 1):
        ends = number == len(rewards)
        episode = Episode(task=TASK, steps=steps, action=f"eat {number}")
        verdict = Score().judge(episode, Answer("Ok.", verdict=Verdict(reward, ends, terminated=ends)))
        assert verdict is not None
        step = Step(observation="", action=episode.action, next_observation="Ok.", reward=verdict.reward)
        steps.append(step)
    return Trajectory(task=TASK, steps=steps, success=verdict.success)


@pytest.mark.parametrize("rewards", [(0.33, 0.33, 0.33), (0.1, 0.2, 0.7), (0.5, 0.5), (0.34, 0.33, 0.34), (0.99,)])
def test_a_completed_episode_earns_exactly_1(rewards: tuple[float, ...]) -> None:
    episode = played(*rewards)
    assert episode.success and episode.reward == 1.0


def test_half_a_score_is_half_a_reward() -> None:
    assert played(0.25, 0.25).reward == 0.5
