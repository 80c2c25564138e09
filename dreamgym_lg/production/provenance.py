"""Origin of a policy, for manifest and model card. No text of the traces is in it."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import distributions
from itertools import product
from pathlib import Path
from platform import python_version
from typing import Any, get_args

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.experiment.choice import kept_policy
from dreamgym_lg.experiment.evaluation import START, START_POLICY
from dreamgym_lg.experiment.experience_models import policy_version
from dreamgym_lg.experiment.workspace import TRAIN, Workspace
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.replay.rows import FAILED
from dreamgym_lg.report.proof import ASSISTED, BASELINES, LABELS, read_claim
from dreamgym_lg.rollout import missing_episodes
from dreamgym_lg.statistics import clustered_rate
from dreamgym_lg.types import Source, Trajectory

_PACKAGES = {
    *("dreamgym-lg", "langgraph", "langchain-core", "torch", "transformers", "tokenizers", "safetensors", "trl", "accelerate"),
    *("datasets", "tinker"),
}


def provenance(work: Workspace, policy: BaseChatModel) -> dict[str, Any]:
    """Origin of a policy as JSON. `training` is None if this experiment did not train it."""
    own, keep = policy_version(policy), kept_policy(work)
    is_kept = bool(keep) and own == policy_version(work.models / keep["policy"])
    is_kept = is_kept and (getattr(policy, "temperature", None) == 0) == (keep["mode"] == "greedy")
    trained = own == policy_version(work.models / "trained")
    baselines = {name: policy_version(work.models / name) for name in BASELINES}
    base = own in baselines.values() and bool(work.record("stage/base/from"))
    others = {baselines["offline_rl"]: "offline RL", baselines["drawn"]: "sft-drawn"}
    supervised = others.get(own, "sft" if base else "")
    return {
        "policy_version": Path(own).name,
        "base_model": _base_model(work) if trained or base else _model_name(own),
        "training": _training(work, supervised) if trained or base else None,
        "data": _data(work.replay_buffer),
        "replay_buffer": {
            "run": work.run_name("").strip("/").rpartition("-")[2],  # what is before it is the name of a folder
            "trajectories": {source: work.replay_buffer.count("trajectories", source=source) for source in get_args(Source)},
        },
        "experience_model": _experience_model(work) if trained else None,
        "evaluation": _evaluation(work, own),
        "claim": _claim(work) if trained or own in baselines.values() else None,
        "sampling_chosen": keep["why"] if is_kept else "",
        "baselines": {name: _evaluation(work, baseline) for name, baseline in baselines.items() if baseline != own},
        "dreamed": _evaluation(work, policy_version(work.models / "dreamed")),
        "versions": {"python": python_version()}
        | {each.name: each.version for each in distributions() if each.name in _PACKAGES},
    }


def _claim(work: Workspace) -> str | None:
    """The verdict of the proof of these trained weights, against the best baseline. None before one."""
    file = work.out / "result.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    proven = result.get("keep", {}).get("instead_of")
    return read_claim(result).verdict if proven == policy_version(work.models / "trained") else None


def _training(work: Workspace, supervised: str) -> dict[str, Any]:
    s = work.stored_settings() or work.settings
    entry = {"world": work.world.name, "seed": s.seed, "settings": asdict(s)}
    if supervised:
        return {**entry, "environment": "traces", "learner": supervised}
    played = sum("episodes" in each for each in work.replay_buffer.metrics(work.run_name(TRAIN)))
    return {**entry, "environment": s.environment, "learner": s.learner, "iterations": played}


def _base_model(work: Workspace) -> str:
    """The name of the model whose weights the training began with, supervised training included."""
    usual = (work.stored_settings() or work.settings).model
    for record, column in ((START, "name"), ("stage/base/from", "model"), (START_POLICY, "name")):
        if name := work.record(record).get(column):
            return _model_name(name if name != "None" else usual)
    return _model_name(usual)


def _model_name(name: str) -> str:
    """A hub name as it is, or a folder's own name without the path."""
    return Path(name).name if Path(name).is_absolute() or Path(name).exists() else name


def _experience_model(work: Workspace) -> dict[str, Any] | None:
    """Version of the dream that the policy was trained in; None without one."""
    name = work.experience_version
    if (work.stored_settings() or work.settings).environment == "real" or not name:
        return None
    stamp = work.models / name / "version"
    record: dict[str, Any] = {"version": _model_name(name)}
    if work.world.assisted:
        record["assisted"] = True
    return {**record, "weights": stamp.read_text()} if stamp.is_file() else record


def _data(buffer: ReplayBuffer) -> dict[str, Any]:
    """Number and hash of the real episodes of training tasks, whatever their order."""
    recorded = list(buffer.real_trajectories(split="train"))
    texts = (
        (each.task.id, each.task.instruction, each.success, [(s.action, s.next_observation, s.valid) for s in each.steps])
        for each in recorded
    )
    hashes = sorted(hashlib.sha256(json.dumps(each).encode()).digest() for each in texts)
    steps = sum(len(each.steps) for each in recorded)
    return {"trajectories": len(recorded), "steps": steps, "sha256": hashlib.sha256(b"".join(hashes)).hexdigest()}


def _evaluation(work: Workspace, own: str) -> list[dict[str, Any]]:
    """Stored evaluations of this policy on held-out tasks, with 95 % intervals over tasks (`clustered_rate`).

    One with episodes that could not be played is left out: there is no verdict without them.
    """
    runs = defaultdict[tuple[str, ...], list[Trajectory]](list)
    prefix, names = work.run_name(""), ("environment", "split", "mode", "experience_model")
    for split, (source, environment) in product(("test", "validation"), (("real", "real"), ("synthetic", "dream"))):
        for each in work.replay_buffer.trajectories(source=source, split=split):  # type: ignore[arg-type]
            parts = each.run.split("/")
            if each.run.startswith(prefix) and FAILED not in each.run and own in (each.policy_version, *parts):
                mode = next((mode for mode in ("greedy", "sampled") if mode in parts), "")
                runs[environment, split, mode, each.experience_version, each.run].append(each)
    rows = []
    for key, episodes in runs.items():
        if not missing_episodes(episodes):
            rate = clustered_rate((each.task.id, each.success) for each in episodes)
            assert rate is not None  # a run has an episode
            figures = {"successes": rate.successes, "episodes": rate.episodes, "interval": (rate.low, rate.high)}
            rows.append({**dict(zip(names, key, strict=False)), **figures})
    return rows


# --- the card -----------------------------------------------------------------------------------------------------------------

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [dreamgym-lg, langgraph, agent]
{base_line}---

# {name}

The policy of a LangGraph agent: the chat model that decides which tool it calls next. {origin}

* Weights `{policy_version}`, {weights}; written {created} with dreamgym-lg {release}.
* Sampling: {sampling}.
* Data: {data}.
* Dream: {dream}.

## Evaluation

{evaluation}

## Use

```python
from dreamgym_lg import load_policy, with_policy

policy = load_policy("{name}")
agent = with_policy(graph, policy)  # your compiled graph, its real tools, this policy as its model
```

{server}`langgraph dev` in this folder serves {served}.

## Limits

The policy was trained for the tools and tasks of one agent and is of little use elsewhere. The folder holds no text of the
traces it was trained on, but a model can repeat what it was trained on: who must not read the traces must not ask the model.
`manifest.json` has the hash of every file, the policy's origin, and all library versions.
"""

_WHERE = {
    "dream": "in a dream",
    "real": "in the real environment",
    "s2r": "in a dream, then in the real environment",
    "dream+real": "in a dream and the real environment in turn",
    "traces": "on recorded episodes",
}
_STAGES = {**LABELS, "base": "base: every recorded success imitated"}
Row = Mapping[str, Any]


def model_card(name: str, record: Mapping[str, Any]) -> str:
    """The README.md of an export. Args: `record`, the content of its manifest."""
    base, training, data, sampling = (record[key] for key in ("base_model", "training", "data", "sampling"))
    origin = f"Base model: {base}."
    if training is not None:
        iterations = f"iterations: {training['iterations']}, " if "iterations" in training else ""
        origin = (
            f"Trained from {base} by {training['learner'].upper()} {_WHERE[training['environment']]} of the world "
            f"`{training['world']}` ({iterations}seed: {training['seed']})."
        )
    dream, remote = record["experience_model"], record.get("tinker")
    others = {**record.get("baselines", {}), "dreamed": record.get("dreamed", [])}
    return _CARD.format(
        name=name,
        base_line=f"base_model: {json.dumps(base)}\n" if "/" in base else "",
        origin=origin,
        sampling=(f"temperature {sampling['temperature']:g}" if sampling["temperature"] else "greedy")
        + f", at most {sampling['max_new_tokens']:,} new tokens"
        + (f" ({chosen})" if (chosen := record.get("sampling_chosen")) else ""),
        data=f"{data['trajectories']:,} real trajectories, {data['steps']:,} steps (SHA-256 `{data['sha256'][:16]}…`)",
        dream=f"`{dream['version']}`" + (f", {ASSISTED}" if dream.get("assisted") else "") if dream else "none",
        evaluation=_evaluation_table(record["evaluation"], others, record.get("claim")),
        served=f"the agent `{record['agent']['path']}` with it" if record["agent"] else "it as a chat",
        weights=f"adapters of `{remote['base_model']}` on Tinker, at `{remote['sampler']}` (to train on: `{remote['state']}`)"
        if remote
        else f"{record['parameters']:,} parameters, safetensors",
        server="" if remote else f"`dreamgym serve {name}` is an OpenAI-compatible server of it, ",
        release=record["versions"]["dreamgym-lg"],
        **{key: record[key] for key in ("policy_version", "created")},
    )


def _evaluation_table(rows: Sequence[Row], others: Mapping[str, Sequence[Row]], claim: str | None) -> str:
    """The proof's verdict, and a table of evaluations. Of the policy's, and of other stages' on real held-out tasks."""
    if not rows:
        return "This policy was not evaluated on held-out tasks before it was exported."
    lines = ["| policy | environment | tasks | sampling | success | 95 % interval |", "| --- | --- | --- | --- | --- | --- |"]
    compared = [("this one", row) for row in rows]
    for name, played in others.items():
        compared += [(_STAGES[name], row) for row in played if (row["environment"], row["split"]) == ("real", "test")]
    for policy, row in compared:
        low, high = row["interval"]
        success = f"{row['successes']} of {row['episodes']}"
        figures = f"{row['mode'] or 'as set'} | {success} | {low:.0%} to {high:.0%}"
        lines.append(f"| {policy} | {row['environment']} | {row['split']} | {figures} |")
    verdict = [f"The trained policy against the best one without a dream: {claim}.", ""] if claim else []
    return "\n".join([*verdict, *lines])
