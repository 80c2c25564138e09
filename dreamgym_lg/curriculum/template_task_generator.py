"""Variations of a tool agent's tasks without any model: a recorded request with the values of other traces."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from random import Random
from typing import Any, NamedTuple

from dreamgym_lg.actions import ToolCall, render_call
from dreamgym_lg.curriculum.alike import AlikeRequests, names_among
from dreamgym_lg.curriculum.cases import Cases, Kind, Success, are_fixed, between
from dreamgym_lg.curriculum.demonstrations import carried_reply, constant_words
from dreamgym_lg.curriculum.donors import Donors, Offer
from dreamgym_lg.curriculum.lists import with_taken_items
from dreamgym_lg.curriculum.plays import (
    Place,
    Play,
    Scalar,
    asked_for,
    by_place,
    exchange,
    form,
    is_empty,
    is_request,
    leaves,
    masked_request,
    paired_values,
    read_play,
    text_of,
    unnumbered,
    whole,
    with_stale_values,
)
from dreamgym_lg.curriculum.task_generator import variation, words
from dreamgym_lg.experience.prompt_formats import first_observation
from dreamgym_lg.types import Task, Trajectory

_SUCCESSES = 4
"""Most kinds of calls that are tried for one variation."""


class TemplateTaskGenerator:
    """A `TaskGenerator` that puts other traces' values (ids, names, amounts, dates) into a recorded request.

    The values of a request are found by comparing it with its trace: what stands in the request and in a call's arguments or
    answers. A variation has the words of a recorded request that asks as the task does, whatever became of it; its values are
    all from another trace, or from several where no call ties them (`Donors`); and what has to be done is what was done in a
    recorded success that asks alike. So the same words, of the same customer, come with an open and with a closed order, and no
    policy gets along by knowing them. It is taken only if that success can be carried over call by call:

    * each call that reads was recorded with the new values, and always answered alike: its answer replaces the old one;
    * the new answers make a case that recorded successes with the same calls and a similar request have been in (`Cases`), and
      those from different traces go together as theirs did (`Cases.met_together`);
    * a call that writes takes its arguments from the request and from these answers, or has a fixed fee, which such successes
      always had and which never failed in the case; where a call has one of few values (three nights), the success's request
      and this one say the same of it;
    * no success with a similar request wrote something else in such a case.

    Which requests ask alike (by their intent, where the traces say it), and which successes were right by luck and are not
    carried over, `AlikeRequests` says.

    The calls so made are `metadata["reference_calls"]`, as action texts, `metadata["reference_answers"]` what each is answered,
    and `metadata["reference_reply"]` the success's final answer with the new values (`demonstration`), "" where it had none or
    says something else, a sum that somebody has computed, say. The rubric is that of the success's task with the new values,
    else it is written from these calls.

    Args:
        trajectories: Real ones of training tasks; seeds are the successes among them.
        writes: Whether a tool, by name, changes the world.
    """

    def __init__(self, trajectories: Sequence[Trajectory], *, writes: Callable[[str], bool]) -> None:
        self._writes = writes
        read = [play for each in trajectories if each.task.split == "train" and (play := read_play(each)) is not None]
        read = with_taken_items(read)
        plays = [play for play in read if play.calls]
        self._known = {first_observation(play.task) for play in read}
        self._answers: dict[str, list[Any]] = defaultdict(list)
        self._texts: dict[str, str] = {}
        counts: dict[Place, Counter[str]] = defaultdict(Counter)
        for play in plays:
            for call, answer, text in zip(play.calls, play.answers, play.texts, strict=True):
                known = self._answers[render_call(*call)]
                known += [answer] if answer not in known else []
                self._texts.setdefault(render_call(*call), text)
            for place, value in play.values():
                counts[unnumbered(place)][text_of(value)] += 1
        # few values for many traces: a status, a kind, a currency
        self._categorical = {place for place, found in counts.items() if len(found) ** 2 <= found.total() > 1}
        self._donors = Donors(plays, writes=writes, categorical=self._categorical)
        self._cases = Cases(counts)
        self._found: dict[frozenset[str], tuple[Cases, Cases]] = {}
        self._of_play: dict[int, tuple[dict[str, list[Place]], set[str]]] = {}  # a play cannot be hashed
        self._choices = {
            text: re.compile(whole(text).pattern, re.IGNORECASE)
            for play in plays
            for place, value in play.values()
            if place[0] == "call" and unnumbered(place) in self._categorical and (text := text_of(value))
        }
        rubrics = Counter(str(play.task.metadata.get("rubric") or "") for play in plays)
        self._rules = {rubric for rubric, number in rubrics.items() if number > 1}
        masked = [masked_request(play, self._slots(play)) for play in read]
        names = names_among(masked)
        worded = [words(request) - names for request in masked]
        requests = [(play, asked_for(play, own)) for play, own in zip(read, worded, strict=True)]
        self._stale = with_stale_values(list(zip(read, worded, strict=True)), self._slots)
        done = [self._success(play, request) for play, request in requests if play.calls]
        self._successes = [each for each in done if each.play.success]
        failures = [each for each in done if not each.play.success]
        self._failures: dict[Kind, list[Success]] = defaultdict(list)
        for each in failures:
            self._failures[each.kind].append(each)
        self._alike = AlikeRequests(requests, self._successes, self._cases, writes=writes, failures=failures)
        self._seeds: dict[str, frozenset[str]] = {}
        for play, request in requests:
            if play.success and play.calls and self._slots(play):
                self._seeds.setdefault(play.task.id, request)
                self._seeds.setdefault(first_observation(play.task), request)

    @property
    def can_vary(self) -> bool:
        """Whether the traces hold a request whose values could be exchanged."""
        return bool(self._seeds) and len(self._donors) > 1

    def seeds(self, tasks: Sequence[Task]) -> list[Task]:
        """Those of the tasks that can be varied: they have a recorded success, with values in the request."""
        return [each for each in tasks if each.split == "train" and {each.id, first_observation(each)} & self._seeds.keys()]

    def __call__(self, task: Task, trajectories: Sequence[Trajectory], rng: Random) -> Task | None:
        """As `TaskGenerator`; None without a recorded success of `task`, or of the task that it was itself varied from."""
        names = (task.id, first_observation(task), str(task.metadata.get("generated", {}).get("seed", "")))
        request = next((self._seeds[name] for name in names if name in self._seeds), None)
        if request is None or task.split != "train":
            return None
        alike, near = self._alike.successes(request), self._alike.successes(request, near=True)
        worded, cases = self._alike.worded(request), self._cases_of(request, alike, near)
        kinds = sorted({each.kind for each in alike})  # what is rarely done is shown as often as what is done every day
        for kind in rng.sample(kinds, min(_SUCCESSES, len(kinds))):
            success = rng.choice([each for each in alike if each.kind == kind])
            chosen = self._chosen(success.play)
            seeds = [play for play in worded if self._chosen(play) == chosen and id(play) not in self._stale]
            if self._untold(success, near):  # only who did the same is known to ask for it
                seeds = [play for play in seeds if self._kind(play) == success.kind]
            if not seeds:
                continue
            seed = rng.choice(seeds)
            slots, own = self._slots(seed), self._slots(success.play)
            if (paired := paired_values(seed, slots, success.play, own)) is None:
                continue
            same = [each for each in alike if each.kind == success.kind and self._chosen(each.play) == chosen]
            others = [each for each in near if each.writes != success.writes and self._chosen(each.play) == chosen]
            # who asks about two orders does not ask for the same as who asks about one
            others = [each for each in others if paired_values(each.play, self._slots(each.play), success.play, own)]
            asked = [success.play, *{each.kind: each.play for each in near}.values()]
            pairs = [(play, paired_values(play, self._slots(play), success.play, own)) for play in asked]
            ties = [(play, pair) for play, pair in pairs if pair is not None]
            for offer in self._donors.draw(own, ties, rng, label=seed):
                found = self._carried_over(success.play, own, offer, same, cases[0])
                if found is None or _contested(found, others, cases[1]):
                    continue
                varied = self._vary(task, seed, success.play, paired, found)
                if varied is not None and first_observation(varied) not in self._known:
                    return varied
        return None

    def by_luck(self, task: Task) -> bool:
        """Whether each recorded success of a task looked up less than most with a similar request."""
        names = {task.id, first_observation(task)}
        own = [each for each in self._successes if names & {each.play.task.id, first_observation(each.play.task)}]
        careful = (each.play in [other.play for other in self._alike.successes(each.request)] for each in own)
        return bool(own) and not any(careful)

    def _success(self, play: Play, request: frozenset[str]) -> Success:
        """Without the answers of calls that write: they decided nothing any more."""
        values = by_place(play).items()
        told = {place: texts for place, texts in values if place[0] != "answer" or not self._writes(unnumbered(place)[1])}
        return Success(play, request, self._kind(play), self._kind(play, writes_only=True), told)

    def _slots(self, play: Play) -> dict[str, list[Place]]:
        """The values in the request that are the trace's own, and where else in the trace each stands."""
        return self._read_request(play)[0]

    def _chosen(self, play: Play) -> set[str]:
        """What the request says of the few values that some argument has: three nights, an express parcel."""
        return self._read_request(play)[1]

    def _read_request(self, play: Play) -> tuple[dict[str, list[Place]], set[str]]:
        if id(play) in self._of_play:
            return self._of_play[id(play)]
        request = first_observation(play.task)
        slots: dict[str, list[Place]] = defaultdict(list)
        for place, value in play.values():
            text = text_of(value)
            short = len(text) < 3 and place[0] != "call"  # a 2 in an answer is not the 2 of "2 days ago"
            if short or (place[0] == "metadata" and is_request(text, request)):
                continue
            if unnumbered(place) not in self._categorical and text and whole(text).search(request):
                slots[text].append(place)
        self._of_play[id(play)] = slots, {text for text, found in self._choices.items() if found.search(request)}
        return self._of_play[id(play)]

    def _carried_over(
        self,
        success: Play,
        slots: Mapping[str, Sequence[Place]],
        offer: Offer,
        successes: Sequence[Success],
        cases: Cases,
    ) -> "_CarriedOver | None":
        """A success with the values of other traces; None where they do not fit."""
        exchanged: dict[str, Scalar] = {}
        for text, places in slots.items():
            taken = {text_of(value) for value in exchanged.values()}  # two orders stay two
            free = ((place, new, value) for place in places for new, value in offer.values[text].get(place, {}).items())
            free = (each for each in free if each[0][0] != "metadata" or form(each[1]) == form(text) or "0" not in form(text))
            pairs = ((place, value) for place, new, value in free if new and new not in taken)
            if (pair := next(pairs, None)) is None or not _fits(*pair, successes, cases):
                return None
            exchanged[text] = pair[1]
        if all(old == text_of(new) for old, new in exchanged.items()):
            return None
        calls, case, unexplained = list[ToolCall](), dict[Place, Scalar](), list[tuple[Place, str]]()
        for name, call, answer in zip(success.names(), success.calls, success.answers, strict=True):
            unexplained += self._unexplained(success, name, call, exchanged)
            calls.append(ToolCall(call.name, exchange(call.arguments, exchanged)))
            if self._writes(call.name):
                continue
            known = self._answers.get(render_call(*calls[-1]), [])
            if len(known) != 1 or not self._learn(exchanged, case, name, answer, known[0], successes, cases):
                return None
        given = {
            place: value
            for name, call in zip(success.names(), calls, strict=True)
            for place, value in leaves(call.arguments, ("call", name))
        }
        if all(self._writes(call.name) for call in calls):
            return None
        if unexplained and not (are_fixed(unexplained, successes) and not cases.met(self._failures[successes[0].kind], case)):
            return None
        if len(offer.traces) > 1 and not cases.met_together(successes, case | given, list(offer.values.values())):
            return None
        alike, constant = cases.alike(successes, case), constant_words(successes, self._writes)
        return _CarriedOver(exchanged, calls, case, offer.traces, alike, constant)

    def _cases_of(self, request: frozenset[str], alike: Sequence[Success], near: Sequence[Success]) -> tuple[Cases, Cases]:
        """The cases of the successes that ask as this request does, and of those that may."""
        if request not in self._found:
            deeds = [each.deed for each in alike], [(each.kind, "") for each in alike], [each.outcome for each in alike]
            self._found[request] = self._cases.among(alike, deeds), self._cases.among(near)
        return self._found[request]

    def _kind(self, play: Play, *, writes_only: bool = False) -> Kind:
        """What was done, whatever the values: of each call the tool, and where each argument's value was taken from."""
        request, known, kind = first_observation(play.task), dict[str, str](), list[tuple[str, ...]]()
        for name, call, answer in zip(play.names(), play.calls, play.answers, strict=True):
            sources = [call.name]
            for place, value in sorted(leaves(call.arguments, ("call", call.name)), key=itemgetter(0)):
                text = text_of(value)
                other = "request" if text in request else text if unnumbered(place) in self._categorical else "?"
                source = "request" if whole(text).search(request) else known.get(text, other)
                sources.append(f"{'/'.join(place[2:])}: {source}")
            if self._writes(call.name) or not writes_only:
                kind.append(tuple(sources))
            for place, value in leaves(answer, ("answer", name)):
                known.setdefault(text_of(value), "/".join(place))
        return tuple(kind)

    def _untold(self, success: Success, others: Sequence[Success]) -> bool:
        """Whether a call holds one of few values (4 nights) that request and answers do not, and others have another."""
        play = success.play
        told = {text for place, texts in success.values.items() if place[0] == "answer" for text in texts} | self._chosen(play)
        return any(
            texts.keys() - told and any(each.values.get(place, texts).keys() != texts.keys() for each in others)
            for place, texts in success.values.items()
            if place[0] == "call" and unnumbered(place) in self._categorical
        )

    def _learn(
        self,
        exchanged: dict[str, Scalar],
        case: dict[Place, Scalar],
        name: str,
        old: Any,
        new: Any,
        successes: Sequence[Success],
        cases: Cases,
    ) -> bool:
        """Add what a new answer says in place of the old one; False if that makes it another case, or cannot be told."""
        before, after = dict(leaves(old, ("answer", name))), dict(leaves(new, ("answer", name)))
        case |= after
        if before.keys() != after.keys() or not cases.seen(successes, case):
            return False
        for place, value in before.items():
            if is_empty(value) != is_empty(after[place]):
                return False  # nothing found where something was, or the other way round: another case
            if isinstance(value, bool) or is_empty(value):
                continue
            if text_of(exchanged.setdefault(text_of(value), after[place])) != text_of(after[place]):
                return False  # one old value would have to become two
        return True

    def _unexplained(self, play: Play, name: str, call: ToolCall, known: Collection[str]) -> list[tuple[Place, str]]:
        """The arguments of a call of which neither request nor answers tell what they have to be in a variation."""
        found = ((place, text_of(value)) for place, value in leaves(call.arguments, ("call", name)))
        request = first_observation(play.task)
        return [
            (place, text)
            for place, text in found
            if text not in known and unnumbered(place) not in self._categorical and text not in request
        ]

    def _vary(self, task: Task, seed: Play, success: Play, paired: Mapping[str, str], found: "_CarriedOver") -> Task | None:
        """The variation. Args: `paired`, for each value of the seed's request the one in its place in the success's."""
        exchanged = {old: found.exchanged[other] for old, other in paired.items()}
        facts = self._facts(seed, found.traces[0], dict(found.exchanged) if success is seed else exchanged)
        if facts is None:
            return None
        made = [render_call(*call) for call in found.calls]
        answers = [
            exchange(text, found.told) if self._writes(call.name) else self._texts[action]
            for call, text, action in zip(success.calls, success.texts, made, strict=True)
        ]
        request = exchange(first_observation(seed.task), exchanged)
        texts, plays = [request, *made, *answers], [each.play for each in found.alike]
        reply = carried_reply(success, plays, found.told, constant=found.constant, texts=texts, few=self._categorical)
        reference = {"reference_calls": made, "reference_answers": answers, "reference_reply": reply}
        carried = "" if success is seed else f", solved as {success.task.id} was"
        given = " and ".join(dict.fromkeys(play.task.id for play in found.traces))
        why = f"the request of {seed.task.id} with the values of {given}, whose answers are recorded{carried}"
        return variation(
            task,
            request,
            rubric=self._rubric(success, found.exchanged, made, reply),
            generated={"generator": "templates", "why": why, "seed": success.task.id},
            metadata={**task.metadata, **facts, **reference},
        )

    def _rubric(self, success: Play, exchanged: Mapping[str, Scalar], made: Sequence[str], reply: str) -> str:
        own = str(success.task.metadata.get("rubric") or "")
        if own:
            return own if own in self._rules else exchange(own, exchanged)
        said = f' An answer that fits: "{reply}"' if reply else ""
        calls = "; ".join(made)
        return (
            f"A success makes these calls, or others to the same effect, and changes nothing else: {calls}. Its answer agrees "
            f"with what they returned.{said}"
        )

    def _facts(self, seed: Play, donor: Play, exchanged: Mapping[str, Scalar]) -> dict[str, Any] | None:
        """The task's own facts with the new values; what the records do not tell is the donor's, None if that has none."""
        facts = seed.facts()
        others = dict(leaves(donor.task.metadata, ("metadata",)))
        known = dict(exchanged)
        for place, value in leaves(facts, ("metadata",)):
            if not text_of(value) or text_of(value) in known or unnumbered(place) in self._categorical:
                continue
            if is_request(text_of(value), first_observation(seed.task)):
                continue  # the new values go into it, as into the request
            if place not in others:
                return None
            known[text_of(value)] = others[place]
        return dict(exchange(facts, known))


class _CarriedOver(NamedTuple):
    """A recorded success with the values of other traces."""

    exchanged: Mapping[str, Scalar]
    """The new value of each old one."""
    calls: Sequence[ToolCall]
    case: Mapping[Place, Scalar]
    """What the new lookups are answered."""
    traces: Sequence[Play]
    """Whose values these are."""
    alike: Sequence[Success]
    """The successes with the same calls that have been in this case."""
    constant: Collection[str]
    """Words that are no value in a text of theirs, whatever they are elsewhere."""

    @property
    def told(self) -> dict[str, Scalar]:
        """The new value of each old one in sentences and in what writing calls return."""
        return {old: new for old, new in self.exchanged.items() if old not in self.constant}


def _fits(place: Place, value: Scalar, successes: Sequence[Success], cases: Cases) -> bool:
    """Whether a request's new value fits these successes. What is asked for is no condition, however few values it had."""
    return between(successes, {place: value}) if place[0] == "call" else cases.seen(successes, {place: value})


def _contested(found: "_CarriedOver", others: Sequence[Success], cases: Cases) -> bool:
    """Whether successes that wrote something else have been in this case."""
    groups: dict[Kind, list[Success]] = defaultdict(list)
    for each in others:
        groups[each.kind].append(each)
    return any(cases.contested(found.case, found.alike, group) for group in groups.values())
