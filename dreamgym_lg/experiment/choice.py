"""Policies chosen by validation tasks: baselines, the start of training, the export."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dreamgym_lg.dream import Dream
from dreamgym_lg.experiment.experience_models import policy_version
from dreamgym_lg.experiment.workspace import Workspace
from dreamgym_lg.report.proof import BASELINES, read_claim
from dreamgym_lg.rollout import check_played
from dreamgym_lg.token_recorder import TrainablePolicy

START_BASELINE = "stage/train/baseline"
"""Record of the baseline that training began with."""
_SAMPLING = "stage/train/sampling"
"""Record of the mode that validation found best for the trained policy."""


class BestPolicy:
    """The best policy on the validation tasks so far, in `models/NAME`. Ties go to the newest."""

    def __init__(self, work: Workspace, name: str) -> None:
        self.work, self.name = work, name

    @property
    def folder(self) -> Path:
        return self.work.models / self.name

    @property
    def figures(self) -> dict[str, Any]:
        """`at`, `successes` and `reward` of the best; empty without one."""
        return self.work.record(f"best/{self.name}")

    def offer(self, at: int, successes: float, reward: float, policy: TrainablePolicy) -> None:
        """Keep this policy unless an earlier one has more successes or, as successful, more reward.

        Args: `successes`, their number or, where evaluations differ in their number of tasks, their share.
        """
        if not (best := self.figures) or (successes, reward) >= (best["successes"], best["reward"]):
            policy.save(self.folder)
            self.work.keep_record(f"best/{self.name}", {"at": at, "successes": successes, "reward": reward})


def validation_panel(work: Workspace) -> str:
    """Place and number of the validation tasks that choose a baseline's weights, e.g. `real 32`."""
    return f"{'real' if work.settings.real_budget != 0 else 'dreamed'} {len(work.validation_tasks())}"


def validation_successes(work: Workspace, name: str) -> int | None:
    """Successes of the baseline `models/NAME` on the validation tasks, if they were played."""
    best = BestPolicy(work, work.record(f"stage/{name}/best").get("folder", "")).figures
    return int(best["successes"]) if best else None


def start_baseline(work: Workspace) -> str:
    """The folder of the baseline that training begins with, or began with.

    Of the baselines that played the same validation tasks as `base`, it has the most successes; ties go by `BASELINES`.
    """
    if work.training_began:
        return str(work.record(START_BASELINE).get("name", "base"))
    panel = work.record("stage/base/best").get("validation")
    comparable = [name for name in BASELINES if work.record(f"stage/{name}/best").get("validation") == panel]
    trained = [name for name in comparable if (work.models / name).exists()]
    return max(trained, key=lambda name: -1 if (won := validation_successes(work, name)) is None else won, default="base")


def resulting_policy(work: Workspace) -> str:
    """The name of the policy that the stages so far lead to; empty without one.

    It is `trained` or, before a training, the best baseline. A training that has not ended leads to none.
    """
    name = "trained" if work.training_began or (work.models / "trained").exists() else start_baseline(work)
    return name if (work.models / name).exists() else ""


def no_policy(work: Workspace) -> str:
    """The error of a folder without a `resulting_policy`."""
    if work.training_began:
        return f"{work.out} holds no trained policy: its training has not ended, and the same train() goes on"
    return f"{work.out} holds no policy: call prepare() or train() (`dreamgym train`) first"


def kept_policy(work: Workspace) -> Mapping[str, str]:
    """The `policy` to export, its `mode`, and `why`. Empty without a policy (`resulting_policy`).

    The last proof's choice, else that of `choose_sampling`.
    """
    name, file = resulting_policy(work), work.out / "result.json"
    if not name:
        return {}
    proven = json.loads(file.read_text()).get("keep") if file.exists() else None
    for keep in (proven, work.record(_SAMPLING)):
        if keep and "mode" in keep and keep["instead_of"] == policy_version(work.models / name):
            return {"policy": name, **keep}
    return {"policy": name, "mode": "sampled", "why": "as in training" if name == "trained" else "as on the validation tasks"}


def choose_policy(result: Mapping[str, Any], resulting: str) -> tuple[str, str, str]:
    """The policy with the most validation successes, its mode, and the reason. Ties: imitation first, then greedy.

    Without a validation success, the proof's claim chooses (`Claim.enough`) between a baseline and the `resulting` policy.
    """
    played = {(name, mode): each for name, modes in result["validation"].items() for mode, each in modes.items()}
    best = max(played, key=lambda key: (played[key]["successes"], key[0] != "trained", key[1] == "greedy"), default=None)
    if best is None or not played[best]["successes"]:
        claim = read_claim(result)
        return claim.baseline if claim.enough else resulting, "sampled", f"{claim.why} (no validation task tells)"
    figures = (f"{name} ({mode}) {each['successes']}" for (name, mode), each in played.items())
    return *best, f"successes on {played[best]['episodes']} real validation tasks: {', '.join(figures)}"


def choose_sampling(work: Workspace, policy: Any, dream: Dream | None) -> None:
    """Choose by validation whether `export` is greedy or samples as trained (`kept_policy`).

    Validation is real with `real_budget=None`, else in the dream.
    """
    tasks, s, version = work.validation_tasks(), work.settings, policy_version(work.models / "trained")
    place, dream = ("real", None) if s.real_budget is None else ("dream", dream)
    if not tasks or (place == "dream" and (dream is None or s.references_only)):
        return
    played = {}
    for mode, temperature in {"greedy": 0.0, "sampled": policy.temperature}.items():
        # real episodes have the proof's run name, which does not play them again
        run = f"proof/validation/trained/{mode}/{version}" if place == "real" else f"validate/dream/{mode}/{version}"
        played[mode] = check_played(work.play(run, policy.with_temperature(temperature), tasks, dream=dream))
    successes = {mode: sum(each.success for each in episodes) for mode, episodes in played.items()}
    mode = "greedy" if successes["greedy"] >= max(successes["sampled"], 1) else "sampled"
    figures = ", ".join(f"{mode} {number}" for mode, number in successes.items())
    why = f"successes on {len(tasks)} validation tasks ({place}): {figures}"
    work.keep_record(_SAMPLING, {"mode": mode, "why": why, "instead_of": version})
    work.say(f"{why}; export is {'greedy' if mode == 'greedy' else f'at temperature {policy.temperature:g}'}")
