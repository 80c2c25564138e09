"""What a policy imitates of a generated task: its calls, what they were answered, and the final answer."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random

from dreamgym_lg.actions import parse_call, render_answer
from dreamgym_lg.curriculum.cases import Success
from dreamgym_lg.curriculum.plays import Place, Play, Scalar, exchange, text_of, unnumbered
from dreamgym_lg.curriculum.task_generator import TaskGenerator, named_values, words
from dreamgym_lg.experience.prompt_formats import first_observation
from dreamgym_lg.types import Step, Task, Trajectory

_TRIES = 30
"""Attempts in a row that make no other demonstration of a task, after which there are no more of it."""
_TOLD = 8
"""Kinds of demonstrations that are counted each, the most frequent."""


def demonstration(task: Task) -> Trajectory | None:
    """The success that a variation was made with, as an episode of it; None where its final answer is not known."""
    reply, seen, steps = task.metadata.get("reference_reply"), first_observation(task), list[Step]()
    if not reply:
        return None
    for action, answer in zip(task.metadata["reference_calls"], task.metadata["reference_answers"], strict=True):
        steps.append(Step(observation=seen, action=action, next_observation=answer))
        seen = answer
    steps.append(Step(observation=seen, action=render_answer(reply), next_observation="", reward=1.0, terminated=True))
    return Trajectory(task=task, steps=steps, source="synthetic", success=True)


def made_demonstrations(
    seeds: Sequence[Task],
    generate: TaskGenerator,
    check: Callable[[Task], str | None],
    *,
    number: int,
    rng: Random,
    progress: Callable[[int], None] = lambda made: None,
) -> list[Trajectory]:
    """Demonstrations of variations of tasks: as many of each task as can be, so that no kind of task crowds out the others.

    Args:
        seeds: The tasks to vary.
        check: As `TaskChecks`.
        number: Most demonstrations; fewer where `_TRIES` attempts in a row make no other one of a task, for each task.
        progress: Called with how many there are, whenever there is another.
    """
    found, made, misses = dict[str, Trajectory](), dict.fromkeys(rng.sample(range(len(seeds)), len(seeds)), 0), Counter[int]()
    while made and len(found) < number:
        seed, before = min(made, key=made.__getitem__), len(found)
        varied = generate(seeds[seed], (), rng)
        if varied is not None and check(varied) is None and (shown := demonstration(varied)) is not None:
            found.setdefault(varied.id, shown)
            progress(len(found))
        made[seed] += len(found) - before
        misses[seed] = misses[seed] + 1 if len(found) == before else 0
        if misses[seed] == _TRIES:
            del made[seed]
    return list(found.values())


def told_by_calls(demonstrations: Sequence[Trajectory], recorded: Sequence[Trajectory]) -> str:
    """How many demonstrations make which calls, in words: what is rare or missing there, a policy learns little about.

    Args: `recorded`, the successes that were to be varied: of these, which calls have no demonstration.
    """
    made, known = Counter(map(_called, demonstrations)), Counter(map(_called, recorded))
    told = _told(made)
    missing = Counter({names: number for names, number in known.items() if names not in made})
    return f"{told}; none of these recorded successes: {_told(missing)}" if missing else told


def _told(counts: Counter[str]) -> str:
    told = [f"{number} {names}" for names, number in counts.most_common(_TOLD)]
    if others := counts.total() - sum(number for _, number in counts.most_common(_TOLD)):
        told.append(f"{others} of {len(counts) - _TOLD} other kinds")
    return "; ".join(told)


def _called(episode: Trajectory) -> str:
    return ", ".join(call.name for step in episode.steps if (call := parse_call(step.action))) or "no call"


def constant_words(successes: Sequence[Success], writes: Callable[[str], bool]) -> frozenset[str]:
    """The words of final answers and of what writing calls returned that are no value in some trace.

    All say "cancelled", whether or not another order of theirs is cancelled too."""
    found = set[str]()
    for each in successes:
        written = (text for call, text in zip(each.play.calls, each.play.texts, strict=True) if writes(call.name))
        values = dict.fromkeys((text for texts in each.values.values() for text in texts), "")
        found.update(re.findall(r"[\w-]+", exchange(" ".join([each.play.said, *written]), values)))
    return frozenset(found)


def carried_reply(
    success: Play,
    alike: Sequence[Play],
    exchanged: Mapping[str, Scalar],
    *,
    constant: Collection[str],
    texts: Sequence[str],
    few: Collection[Place],
) -> str:
    """The success's final answer with the new values; "" unless it is what all said in this case, their values aside, and names
    nothing that is not in these texts.

    Args:
        alike: The successes that have been in the case.
        exchanged: The new value of each old one, without those of `constant`.
        constant: `constant_words`, which stay.
        texts: Request, calls and answers of the variation.
        few: Where few values stand: which one it is makes no other answer.
    """

    def masked(play: Play) -> str:
        places = {text_of(value): place for place, value in reversed([*play.values()])}
        masks = {text: "" if unnumbered(place) in few else "/".join(place) for text, place in places.items()}
        return str(exchange(play.said, {text: mask for text, mask in masks.items() if text not in constant}))

    reply = str(exchange(success.said, exchanged))
    said = [masked(play) for play in alike]
    if {*said} != {masked(success)}:
        return ""
    # what others say as well is about nobody, unless this request says it too: they may have asked for as much
    common = words(said[0]) - words(first_observation(success.task)) if len(said) > 1 else frozenset[str]()
    addressed = words(" ".join(re.findall(r"(?:^|[.!?]\s+)([A-Z]\w+)(?=,)", reply)))
    known = common.union(*map(words, texts))
    return reply if known.issuperset(named_values(reply) | addressed) else ""
