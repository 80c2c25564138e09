"""A judge of groups. A chat model compares the episodes of one task (RULER's idea, OpenPipe 2025)."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from statistics import fmean
from typing import NamedTuple

from langchain_core.language_models import BaseChatModel
from pydantic import BaseModel

from dreamgym_lg.dream.dream import Dream
from dreamgym_lg.dream.facts import message_text
from dreamgym_lg.dream.judges import RUBRIC
from dreamgym_lg.dream.model import Model
from dreamgym_lg.dream.parts import Answer, Episode, Verdict
from dreamgym_lg.dream.prompter import ChatModelPart, Prompter
from dreamgym_lg.dream.prompts import encoded, json_prompt, read_form
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.tasks import first_observation, is_tool_task, rules
from dreamgym_lg.types import Task, Trajectory

_PROMPT = "rank-json-1"
PENDING = "not compared with its group yet"
"""Reason of a verdict that is replaced when the whole group has been played."""


class _Answer(BaseModel, extra="forbid", strict=True):
    reason: str
    scores: list[int]


class Ranking(NamedTuple):
    """A group's rewards from two comparisons, the second in reversed order, and their agreement."""

    rewards: list[float]
    """Each episode's share of wins over the others, 0 to 1. A tie is half a win, as is a win in only one of the two orders."""
    consistency: float
    """Share of the pairs that both orders decide in the same way."""
    reason: str


class RelativeJudge(ChatModelPart):
    """Rewards a tool agent's episodes by comparison within their group.

    Only training compares groups, once all their episodes have ended and if no other judge has decided any of them. No episode
    is a success; elsewhere the reward is 0.

    Args: `model`, a chat model that writes JSON, its name, or a `Model` whose chat model it shares; `hosted`, as for `Model`.
    """

    name = "relative"

    def __init__(self, model: BaseChatModel | Model | str, *, hosted: Hosted | None = None) -> None:
        self.prompter = model.prompter if isinstance(model, Model) else Prompter(model, hosted=hosted)
        self.version = f"{self.prompter.version}/{_PROMPT}"

    def judge(self, episode: Episode, answer: Answer | None) -> Verdict | None:
        return Verdict(0.0, False, PENDING, final=False) if answer is None and is_tool_task(episode.task) else None

    async def rank(self, group: Sequence[Trajectory]) -> Ranking:
        """Compare episodes of one task. Identical ones share a place; an unreadable comparison is a tie of all."""
        summaries = list(map(_summary, group))
        texts = list(map(encoded, summaries))
        distinct = dict(zip(texts, summaries, strict=True))
        episodes, n = [*distinct.values()], range(len(distinct))
        if len(n) < 2:
            return Ranking([0.5] * len(group), 1.0, "all did the same")
        try:
            comparisons = (self._scores(group[0].task, order) for order in (episodes, episodes[::-1]))
            answer, reverse_answer = await asyncio.gather(*comparisons)
        except PredictionFailed as error:
            return Ranking([0.5] * len(group), 0.0, f"unreadable: {error}")
        orders = answer.scores, reverse_answer.scores[::-1]
        signs = {(i, j): [(s[i] > s[j]) - (s[i] < s[j]) for s in orders] for i in n for j in n if i != j}
        wins = {text: fmean(0.5 + sum(signs[i, j]) / 4 for j in n if i != j) for i, text in enumerate(distinct)}
        consistency = fmean(float(first == second) for first, second in signs.values())
        return Ranking([wins[text] for text in texts], consistency, answer.reason)

    async def _scores(self, task: Task, episodes: Sequence[object]) -> _Answer:
        content: dict[str, object] = {"task": first_observation(task), "rules": "" if task.rubric else rules(task)}
        content |= {"success": task.rubric or RUBRIC, "episodes": episodes}

        def read(text: str) -> _Answer:
            if len((answer := read_form(text, _Answer)).scores) != len(episodes):
                raise PredictionFailed(f"{len(answer.scores)} scores for {len(episodes)} episodes")
            return answer

        return await self.prompter.ask(json_prompt(_PROMPT, content), read, prompt=_PROMPT)


async def compare_groups(dream: Dream | None, episodes: Sequence[Trajectory], replay_buffer: ReplayBuffer) -> list[Trajectory]:
    """The episodes of a rollout with the rewards of the dream's `RelativeJudge`, if any.

    Stores the rewards, and the judge's agreement with itself as metric `judge_consistency`. Args: `episodes`, ordered by task.
    """
    judge = next((each for each in dream.judges if isinstance(each, RelativeJudge)), None) if dream else None
    if judge is None:
        return list(episodes)
    played = (each for each in episodes if each.error is None)
    groups = [list(group) for _, group in groupby(played, key=lambda episode: episode.task.id)]
    # if one episode of a compared group was played again, the whole group is compared again
    undecided = [g for g in groups if all(each.steps and each.steps[-1].judged_by == judge.name for each in g)]
    waiting = [group for group in undecided if any(each.steps[-1].reasoning == PENDING for each in group)]
    rankings = await asyncio.gather(*map(judge.rank, waiting))
    rewarded = dict[int, Trajectory]()
    for group, ranking in zip(waiting, rankings, strict=True):
        for each, reward in zip(group, ranking.rewards, strict=True):
            last = replace(each.steps[-1], reward=reward, reasoning=f"compared with its group: {ranking.reason}")
            rewarded[id(each)] = replace(each, steps=[*each.steps[:-1], last])
            replay_buffer.set_reasoning(each, [step.reasoning for step in rewarded[id(each)].steps], reward=reward)
    if rankings:
        figures = {"judge_consistency": fmean(ranking.consistency for ranking in rankings)}
        replay_buffer.record_metrics(episodes[0].run, episodes[0].iteration, figures)
    return [rewarded.get(id(each), each) for each in episodes]


def _summary(episode: Trajectory) -> dict[str, object]:
    *steps, last = episode.steps
    calls = [{"action": step.action, "answer": step.next_observation, "valid": step.valid} for step in steps]
    return {"steps": calls, "message": message_text(last.action)}
