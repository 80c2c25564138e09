"""Real traces as parts of a dream: recorded answers respond, recorded successes judge."""

import json
import re
from collections.abc import Sequence

from dreamgym_lg.actions import is_answer
from dreamgym_lg.dream.facts import facts, message_facts, message_text, new_facts
from dreamgym_lg.dream.parts import Answer, Episode, Verdict
from dreamgym_lg.dream.trace_index import (
    Call,
    Effects,
    Success,
    TraceIndex,
    Votes,
    said_before,
    unordered,
    worlds_of,
)
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.splits import words
from dreamgym_lg.tasks import described, first_observation, is_tool_task, schemas
from dreamgym_lg.types import IMPUTED, Task

_YEAR_OF_DATE = re.compile(r"\b(\d{4})-\d\d-\d\d(?!\d)")


class Recorded:
    """Answers a call as it was recorded after the same writing calls, byte for byte.

    * A reading call repeated without a writing call in between gets the same answer as before in the episode.
    * Traces of the same task come first, then those of the same world. If recordings disagree, more than half must agree.
    * The wording of free text in writing calls does not count. An answer that shows it is not given.
    * A look-up of an unknown thing gets the answer that most different unknown things got, usually an error.

    It answers no text agent. Args: `traces`, a replay buffer or its `TraceIndex`, which tells which tools write.
    """

    name, version = "recorded", ""

    def __init__(self, traces: ReplayBuffer | TraceIndex) -> None:
        self.index = TraceIndex.of(traces)

    def respond(self, episode: Episode) -> Answer | None:
        self.index.refresh(only_once=bool(episode.steps))
        if (call := self.index.call(episode.action)) is None:
            return None
        recorded = None if episode.task.drawn else self._recorded(episode, call)
        return self._repeated(episode, call) or recorded or self._missed(episode, call)

    def _repeated(self, episode: Episode, call: Call) -> Answer | None:
        """The answer of an identical reading call in this episode, since its last writing call."""
        if self.index.writes(call.tool):
            return None
        for step in reversed(episode.steps):
            if (earlier := self.index.call(step.action)) == call:
                return Answer(step.next_observation, step.valid, step.reasoning)
            if earlier is not None and step.valid and self.index.writes(earlier.tool):
                return None
        return None

    def _recorded(self, episode: Episode, call: Call) -> Answer | None:
        calls = [(self.index.call(step.action), step.valid) for step in episode.steps]
        exact, effects = self.index.exact_effects(calls), self.index.effects(calls)
        return self._answer(episode, call, exact) or (self._answer(episode, call, effects) if exact != effects else None)

    def _answer(self, episode: Episode, call: Call, effects: Effects) -> Answer | None:
        """The answer that most traces have after these writing calls. None where their free text makes a difference."""
        scopes = worlds_of(episode.task.id, episode.task.environment)
        by_wording = self.index.wordings.get((scopes[1], call, effects), {}).values()
        if len(set(map(frozenset, by_wording))) > 1:
            return None
        of_task, of_world = (self.index.answers.get((scope, call, effects), {}) for scope in scopes)
        if not episode.own_traces:
            none = Votes(0, "")
            of_world = {key: v._replace(number=v.number - of_task.get(key, none).number) for key, v in of_world.items()}
            of_task = {}
        for answers in (of_task, of_world):
            if not answers:
                continue
            (answer, valid), votes = max(answers.items(), key=lambda each: each[1].number)
            if 2 * votes.number > sum(each.number for each in answers.values()):
                return Answer(answer, valid, votes.reasoning)
        return None

    def _missed(self, episode: Episode, call: Call) -> Answer | None:
        """The usual answer to a look-up of an unknown thing."""
        task = episode.task
        before = " ".join([said_before(task), *(step.next_observation for step in episode.steps)])
        without = "" if episode.own_traces else task.id
        miss = None if self.index.writes(call.tool) else self.index.miss(task.environment, call, before, without=without)
        return None if miss is None else Answer(*miss)


class References:
    """Judges a tool agent's episode by the writing calls and messages of recorded successes.

    * A success needs exactly the writing calls of one of them, those of one tool in the same order. Refused calls and the
      wording of free text do not count. An argument with listed values is no free text.
    * Its messages have to state the ids and amounts that the last messages of all these successes stated, except those of the
      request, of the user's replies and of answers to writing calls. Its last one may state no other that does not occur in
      the episode. Free text in calls needs the ids and amounts that all these successes wrote there.
    * If messages or free text are worded differently, or lack or add an id or amount, the verdict is not final: it counts only
      if no other judge decides. It is a failure if a recorded failure wrote the same free text.

    Without a recorded success, or if neither side made a writing call, the next judge decides. A drawn task is always decided.

    Args: `traces`, as for `Recorded`; `conversations`, True to judge by successes in which a user replied too.
    """

    name, version = "references", ""

    def __init__(self, traces: ReplayBuffer | TraceIndex, *, conversations: bool = False) -> None:
        self.index, self.conversations = TraceIndex.of(traces), conversations

    def judge(self, episode: Episode, answer: Answer | None) -> Verdict | None:
        if answer is not None or not is_answer(episode.action):
            return None
        references = self.of_episode(episode)
        done = unordered(effects_of(self.index, episode))
        if not references or (not done and any(not each.effects for each in references) and not episode.task.drawn):
            return None
        if alike := [each for each in references if done == each.effects]:
            texts = self.index.free_texts(episode.steps)
            if fault := message_fault(episode, alike) or _text_fault(texts, alike):
                return Verdict(0.0, False, fault, final=bool(episode.task.drawn))
            if self._failed(episode, alike, texts):
                return Verdict(0.0, False, "a recorded failure made these calls with the same words", final=False)
            same = any(_wording(episode.action) == _wording(each.message) and texts == each.texts for each in alike)
            unread = "" if same else "; no judge read the words of its message and calls"
            return Verdict(1.0, True, f"the writing calls and facts are those of a recorded success{unread}", final=same)
        needed = " or ".join(sorted({_in_words(each.effects) for each in references}))
        return Verdict(0.0, False, f"a recorded success made {needed}; this episode made {_in_words(done)}")

    def _failed(self, episode: Episode, alike: Sequence[Success], texts: Sequence[str]) -> bool:
        """True if a recorded failure wrote these free texts, and no success did.

        A failure whose message lacks what theirs tell shows nothing about its texts.
        """
        if not episode.own_traces or any(texts == each.texts for each in alike):
            return False
        needed = frozenset.intersection(*(each.facts for each in alike))
        failures = self.index.failures.get(episode.task.id, ())
        alike_failures = (each for each in failures if each.effects == alike[0].effects and each.texts == texts)
        return any(needed <= message_facts(message_text(each.message)) for each in alike_failures)

    def of_episode(self, episode: Episode) -> list[Success]:
        """The recorded successes of the episode's task; none if an answer was imputed."""
        # an imputed answer shows another state than the recorded one, in which another solution is right
        imputed = any(step.decided_by == IMPUTED for step in episode.steps)
        return [] if imputed else self.references(episode.task, own_traces=episode.own_traces)

    def references(self, task: Task, *, own_traces: bool = True) -> list[Success]:
        """The recorded successes of the task that the agent's tools can repeat.

        Args: `own_traces`, False to leave out those of the task's own id.
        """
        self.index.refresh()
        tools = {tool["name"] for tool in schemas(task)}
        return [
            each
            for each in self.index.references(task, own_traces=own_traces)
            if (self.conversations or each.turns < 2) and (not tools or tools.issuperset(call.tool for call in each.effects))
        ]

    def differ_in_free_text(self, episode: Episode, references: Sequence[Success]) -> bool:
        """True for the writing calls of one of these successes with other free texts."""
        done, texts = unordered(effects_of(self.index, episode)), self.index.free_texts(episode.steps)
        return any(each.effects == done and each.texts != texts for each in references)

    def decides(self, task: Task) -> bool:
        """True if the writing calls of every outcome of the task are decided here."""
        references = self.references(task) if is_tool_task(task) else []
        return bool(references) and (bool(task.drawn) or all(each.effects for each in references))


def effects_of(index: TraceIndex, episode: Episode) -> Effects:
    """The writing calls of an episode so far, in their order."""
    return index.effects((index.call(step.action), step.valid) for step in episode.steps)


def message_fault(episode: Episode, successes: Sequence[Success]) -> str:
    """The last message's first fault, compared with those of recorded successes; "" for none."""
    message, recorded = message_text(episode.action), [message_text(each.message) for each in successes]
    if not message.strip() and all(map(str.strip, recorded)):
        return "the message is empty, and that of a recorded success is not"
    stated = facts(message)
    messages = [message, *(message_text(step.action) for step in episode.steps if is_answer(step.action))]
    if missing := frozenset.intersection(*(each.facts for each in successes)) - message_facts(*messages):
        return f"no message has {', '.join(sorted(missing))}, which each recorded success told"
    seen = [described(episode.task), first_observation(episode.task), *recorded]
    seen += [text for step in episode.steps for text in (step.action, step.next_observation)]
    shown = facts(*seen).union(*map(words, seen), *map(_YEAR_OF_DATE.findall, seen))  # 72.00 may be shown as 72
    if invented := new_facts(stated, shown):
        return f"the message tells {', '.join(sorted(invented))}, which nothing in the episode shows"
    text, drawn = f" {' '.join(words(message))} ", episode.task.drawn
    if missing := frozenset(each for each in drawn.get("told", ()) if f" {each} " not in text):
        return f"the message lacks {', '.join(sorted(missing))}"
    if wrong := {each for each in drawn.get("untold", ()) if f" {each} " in text}:
        return f"the message tells {', '.join(sorted(wrong))}, which is not so"
    return ""


def _text_fault(texts: Sequence[str], successes: Sequence[Success]) -> str:
    """The ids and amounts that these free texts lack, and those of all successes have."""
    missing = frozenset.intersection(*(facts(*each.texts) for each in successes)) - message_facts(*texts)
    return f"its writing calls lack {', '.join(sorted(missing))}, which each recorded success wrote" if missing else ""


def _wording(action: str) -> list[str]:
    return message_text(action).casefold().split()


def _in_words(effects: Sequence[Call]) -> str:
    calls = (f"{tool} {json.dumps(dict(arguments), ensure_ascii=False)}" for tool, arguments in effects)
    return ", ".join(calls) or "no writing call"
