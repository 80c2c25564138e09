"""The proof of a finished run as `report.html` and a table.

Page and terminal show the same figures. Missing, null and impossible values are left out, never guessed. A gain over the best
baseline whose interval includes 0 is called not proven.
"""

from base64 import b64encode
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dreamgym_lg.report import curves
from dreamgym_lg.report.curves import Evaluation, History, read_number, read_rate
from dreamgym_lg.report.pages import check_installed, create_templates, text
from dreamgym_lg.statistics import Rate, paired_interval
from dreamgym_lg.types import DECIDERS, Trajectory

if TYPE_CHECKING:
    from rich.table import Table

LABELS = {
    "start": "start, untrained",
    "base": "imitation of every success",
    "filtered": "filtered imitation, no dream",
    "offline_rl": "offline RL, no dream",
    "drawn": "imitation of drawn tasks too",
    "dreamed": "dream, before the real part",
    "trained": "trained",
}
"""Labels of a proof's stages, in order. Only the last two need dreamed episodes."""
ENOUGH = "imitation is enough"
MIN_TASKS = 20
"""Least number of tasks for the claim that imitation is enough."""
BASELINES = ("base", "filtered", "offline_rl", "drawn")
"""Policies trained without a dreamed episode: on every recorded success; on the best recorded episodes; on all episodes with an
outcome; on successes and the references of drawn tasks. The second and the last may be missing."""
POLICIES = (*BASELINES, "dreamed", "trained")
"""The policies of a proof. `dreamed` is the trained one after the dreamed part of S2R; any other training has none."""
GAINS = {
    ("drawn", ""): "What imitation of drawn tasks adds before any dream",
    ("dreamed", ""): "What the dream adds before the real part",
    ("trained", "dreamed"): "What the real part adds to the dream",
}
"""Gains of single stages that a report tells. Key: the policy, and the one before it (empty: the best without a dream)."""


class Claim(NamedTuple):
    """The comparison of a policy with the best stage before it, in one mode."""

    word: str
    """`proven`, `not proven` or `worse`. Proven and worse need a 95 % interval of the difference that excludes 0."""
    why: str
    baseline: str = ""
    """The best of `BASELINES`; empty where it is not known."""
    enough: bool = False
    """True if the trained policy's success rate, on at least `MIN_TASKS` of these tasks, is not above a baseline's."""

    @property
    def verdict(self) -> str:
        return f"{self.word}: {self.why}" + (f"; {ENOUGH}" if self.enough else "")


def read_claim(result: Mapping[str, Any], mode: str = "sampled", policy: str = "trained", before: str = "") -> Claim:
    """The claim about a policy's gain over the best one without a dream (`Experiment.prove`).

    The difference is paired over the tasks that both played and that share no entity with a training task; without such tasks
    nothing is proven.

    Args: `mode`, `sampled` or `greedy`; `policy`, of `POLICIES`: a baseline is compared with those before it; `before`, another
    policy to compare with.
    """
    records = _records(result, mode)
    rates = {policy: rate for policy, record in records.items() if (rate := read_rate(record))}
    if lack := _not_played(result, rates, policy, before):
        return Claim("not proven", lack)
    shared = result.get("shared_entities") or {}
    values = {name: _success_on_others(records[name], shared, rate) for name, rate in rates.items()}
    earlier = BASELINES[: POLICIES.index(policy)]
    imitation = max((name for name in earlier if name in rates), key=values.__getitem__, default="start")
    best = before or ("start" if "start" in rates and values["start"] > values[imitation] else imitation)
    new, old = (records[name].get("outcomes") or {} for name in (policy, best))
    common = [task for task in new if task in old]
    pairs = [(bool(new[task]), bool(old[task])) for task in common if task not in shared]
    # no example: model cards have no text of the traces
    left_out = f"{len(common) - len(pairs)} of {len(common)} held-out tasks share an entity or all words with training tasks"
    if not pairs:
        why = left_out if common else f"{LABELS[policy]} and {LABELS[best]} played no task in common"
        return Claim("not proven", why, imitation)
    gain, (low, high) = sum(one - other for one, other in pairs) / len(pairs), paired_interval(pairs)
    word = "proven" if low > 0 else "worse" if high < 0 else "not proven"
    why = f"{LABELS[policy]} − {LABELS[best]} {gain:+.2f} [{low:+.2f}, {high:+.2f}], paired on {len(pairs)} tasks"
    why += f"; {left_out} and do not count" if len(pairs) < len(common) else ""
    is_dream = policy == "trained" and not before
    enough = is_dream and imitation != "start" and values[policy] <= values[imitation] > 0 and len(pairs) >= MIN_TASKS
    return Claim(word, why, imitation, enough)


def _not_played(result: Mapping[str, Any], rates: Mapping[str, Rate], policy: str, before: str) -> str:
    """The policies that a claim needs and that were not played, in words. Arguments as of `read_claim`."""
    if "base" not in rates or policy not in rates:
        return f"imitation of your traces and the {policy} policy were not both played"
    if before:
        return "" if before in rates else f"the {before} policy was not played"
    for baseline, name in (("filtered", "filtered imitation of"), ("offline_rl", "offline RL on")):
        if (data := result.get(baseline)) is None or (data and baseline not in rates):
            return f"{name} the same data was not played"
    return "imitation of the drawn tasks was not played" if result.get("drawn") and "drawn" not in rates else ""


def _trained(result: Mapping[str, Any]) -> bool:
    """False for a proof before a training, of the policies without a dream."""
    return not (real := result.get("real")) or "trained" in real


def _kept(result: Mapping[str, Any]) -> str:
    """The baseline that validation chose."""
    return str((result.get("keep") or {}).get("policy", "base"))


def _success_on_others(record: Mapping[str, Any], shared: Collection[str], rate: Rate) -> float:
    """Success on the tasks that share nothing with a training task; else on all."""
    outcomes = [bool(success) for task, success in (record.get("outcomes") or {}).items() if task not in shared]
    return sum(outcomes) / len(outcomes) if shared and outcomes else rate.value


def stages(result: Mapping[str, Any], mode: str = "sampled") -> dict[str, Rate]:
    """Real success after each stage, by its label. Args: as of `read_claim`."""
    rates = {LABELS[policy]: read_rate(record) for policy, record in _records(result, mode).items()}
    return {label: rate for label, rate in rates.items() if rate}


def _records(result: Mapping[str, Any], mode: str) -> dict[str, Mapping[str, Any]]:
    return {policy: _figures(result, "real", policy, mode) for policy in LABELS}


def _figures(result: Mapping[str, Any], place: str, policy: str, mode: str) -> Mapping[str, Any]:
    return ((result.get(place) or {}).get(policy) or {}).get(mode) or {}


EPISODES_SHOWN = 12
MODES = ("sampled", "greedy")  # how actions were chosen; the first is the headline
NODES = ("curriculum", "rollout", "update_policy", "evaluate")
STEPS = {"offline": "offline", "train": "in training", "evaluation": "evaluation"}
ASSISTED = "assisted by the world's rules"
"""Remark about a dream in which the world's own rules answer or judge (`World.assisted`)."""
NOTE = (
    "Base: trained on every recorded success. Whiskers and bands: 95 % intervals. Uniform groups: all rollouts earned the "
    "same. Variance: of rewards, the mean over groups."
)
FILTERED = "Filtered: imitates the {:,.0f} best recorded episodes, no dream. "
UNFILTERED = "No filtered imitation: the successes are the best recorded episodes. "


class Row(NamedTuple):
    """One policy in one mode, on the same tasks in reality and in the dream."""

    policy: str
    mode: str
    real: Rate | None
    dream: Rate | None

    @property
    def label(self) -> str:
        return self.policy if self.policy in ("base", "trained") else LABELS[self.policy]

    @property
    def gap(self) -> str:
        return Evaluation(self.real, self.dream).gap


def write_report(
    result: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], episodes: Sequence[Trajectory], out: Path
) -> Path:
    """Write `report.html` into the folder `out` and return its path.

    The page is self-contained: the picture is embedded, nothing is fetched, there is no script, all text is escaped. `metrics`
    may be empty, out of order or have gaps; of two records of an iteration the later counts. The page shows the first
    EPISODES_SHOWN episodes and their total number. Raises `MissingDependency` without matplotlib or jinja2.
    """
    check_installed("matplotlib", "jinja2", extra="report")
    page = _page(result, curves.by_iteration(metrics), episodes)
    out.mkdir(parents=True, exist_ok=True)
    html = out / "report.html"
    html.write_text(page, encoding="utf-8", errors="replace")  # a model may emit half a surrogate pair
    return html


def summary_table(result: Mapping[str, Any]) -> "Table":
    """Real and dreamed success, gap and invalid actions per policy and mode."""
    from rich.table import Column, Table
    from rich.text import Text

    figures = (Column(name, justify="right") for name in ("real", "dream", "gap", "invalid"))
    policy, title, caption = Column("policy", min_width=10), Text(_title(result)), Text(claims(result)[0]["verdict"])
    table = Table(policy, "mode", *figures, title=title, caption=caption)
    for row in _rows(result):
        invalid = text(row.real.invalid_share, ".0%") if row.real else "–"
        table.add_row(*map(Text, (row.label, row.mode, text(row.real), text(row.dream), row.gap, invalid)))
    return table


def _rows(result: Mapping[str, Any]) -> list[Row]:
    """One row per mode and policy with figures; always of `base` and a trained one."""
    rows = []
    for mode, policy in product(MODES, ("start", *POLICIES)):
        real, dream = (_figures(result, place, policy, mode) for place in ("real", "dream"))
        if real or dream or policy == "base" or (policy == "trained" and _trained(result)):
            rows.append(Row(policy, _mode(result, mode), read_rate(real), read_rate(dream)))
    return rows


def _mode(result: Mapping[str, Any], mode: str) -> str:
    temperature = read_number(result.get("temperature"))
    return mode if mode == "greedy" else f"temperature {1 if temperature is None else temperature:g}"


def claims(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """Success after each stage and the verdict, per mode, and the gains of single stages. The first is the headline."""
    counts = result.get("real_steps") or {}
    spent = read_number(counts.get("train"))
    tail = f"; {spent:,.0f} real steps spent in training" if spent is not None else ""
    claims: list[dict[str, str]] = []
    for mode in MODES:
        rates, name = stages(result, mode), _mode(result, mode)
        played = " and ".join(dict.fromkeys(str(rate.episodes) for rate in rates.values()))
        steps = " → ".join(f"{label} {text(rate)}" for label, rate in rates.items())
        sentence = f"Real success ({name}) on {played or 'no'} held-out episodes: {steps}{'' if claims else tail}"
        claim = read_claim(result, mode) if _trained(result) else read_claim(result, mode, _kept(result), "start")
        claims.append({"sentence": sentence, "word": claim.word, "verdict": claim.verdict})
        for (policy, before), sentence in GAINS.items():
            gain = read_claim(result, mode, policy, before)
            if gain.baseline and (not before or LABELS[before] in rates):
                claims.append({"sentence": f"{sentence} ({name})", "word": gain.word, "verdict": f"{gain.word}: {gain.why}"})
    return claims


def _note(result: Mapping[str, Any]) -> str:
    imitated = read_number(result.get("filtered"))
    filtered = "" if imitated is None else FILTERED.format(imitated) if imitated else UNFILTERED
    start_label, how = LABELS.get(result.get("began") or ""), result.get("offline_rl")
    start = f"Training began with the {start_label}. " if start_label else ""
    offline = "" if how is None else f"Offline RL: {how or 'none, all episodes earned the same'}. "
    advice = result.get("advice") or {}
    before = f"Advice before training by {advice['learner']}: {advice['verdict']}; {advice['why']}. " if advice else ""
    shared = next((f"{id} ({entity})" for id, entity in (result.get("shared_entities") or {}).items()), "")
    tasks = f"A held-out task that shares this with a training task: {shared}. " if shared else ""
    return start + filtered + offline + before + tasks + NOTE


def _title(result: Mapping[str, Any]) -> str:
    where = f"{result.get('world', 'unnamed')}, seed {result.get('seed', '–')}"
    dream = f"a dream {ASSISTED}" if result.get("assisted") is True else "a dream"
    places = {"real": "the real environment", "s2r": f"{dream}, then the real environment"}
    places["dream+real"] = f"{dream} and the real environment in turn"
    trained = places.get((result.get("settings") or {}).get("environment", "dream"), dream)
    if not _trained(result):
        return f"Policies without a dream, in the real environment: {where}"
    claim = read_claim(result)
    beginning = f"{ENOUGH.capitalize()}; trained" if claim.enough else "Trained"
    return f"{beginning} in {trained}, {claim.word} in the real environment: {where}"


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 1.5 else f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _node_seconds(history: History) -> dict[str, float]:
    return {node: total for node in NODES if (total := sum(curves.read_series(history, f"seconds_{node}").values()))}


def _steps(result: Mapping[str, Any]) -> dict[str, int]:
    counts = result.get("real_steps") or {}
    return {STEPS[kind]: int(count) for kind in STEPS if (count := read_number(counts.get(kind))) is not None}


def _dreamed(result: Mapping[str, Any]) -> str:
    """Number, speed and deciders of the training's dreamed steps; empty without any."""
    steps = result.get("dreamed_steps") or {}
    counts, seconds = steps.get("decided_by") or {}, steps.get("seconds")
    answered = sum(number for name, number in counts.items() if name)
    shares = (f"{DECIDERS.get(name, name)} {number / answered:.0%}" for name, number in counts.items() if name)
    speed = f", {sum(counts.values()) / seconds:.1f} a second with the policy's replies" if seconds else ""
    return f"{sum(counts.values()):,} dreamed steps{speed}; answered by: {', '.join(shares) or 'nobody'}" if counts else ""


def _page(result: Mapping[str, Any], history: History, episodes: Sequence[Trajectory]) -> str:
    templates = create_templates(duration=_duration, number=read_number)
    return templates.get_template("report.html.j2").render(
        result=result, title=_title(result), claims=claims(result), rows=_rows(result), steps=_steps(result),
        evaluations=curves.read_evaluations(history), spent=curves.read_real_steps(history), history=history,
        nodes=_node_seconds(history), note=_note(result),
        dreamed=_dreamed(result), ended=[{}, *history.values()][-1].get("end_cause"),
        episodes=episodes[:EPISODES_SHOWN], given=len(episodes), picture=b64encode(curves.draw_run(history)).decode(),
    )  # fmt: skip
