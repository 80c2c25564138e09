"""The model card of an exported policy: its README.md."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dreamgym_lg.report.proof import ASSISTED

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- dreamgym-lg
- langgraph
- agent
{base_line}---

# {name}

The policy of a LangGraph agent: the chat model that decides which tool it calls next. {origin}

* Weights `{policy_version}`, {parameters:,} parameters, safetensors; written {created} with dreamgym-lg {release}.
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

`dreamgym serve {name}` is an OpenAI-compatible server of it, `langgraph dev` in this folder serves {served}.

## Limits

The policy was trained for the tools and tasks of one agent and is of little use elsewhere. The folder holds no text of the
traces it was trained on, but a model can repeat what it was trained on: who must not read the traces must not ask the model.
`manifest.json` has the hash of every file, what the policy was trained from, and all library versions.
"""

_WHERE = {
    "dream": "in a dream",
    "real": "in the real environment",
    "s2r": "in a dream, then in the real environment",
    "traces": "on recorded successes",
}
_BASELINES = {"base": "base: every recorded success imitated", "filtered": "filtered imitation, no dream"}
Row = Mapping[str, Any]


def model_card(name: str, record: Mapping[str, Any]) -> str:
    """The card of the policy that `record`, the content of its manifest, tells of."""
    base, training, data = record["base_model"], record["training"], record["data"]
    agent = record["agent"]
    origin = f"Base model: {base}."
    if training is not None:
        iterations = f"iterations: {training['iterations']}, " if "iterations" in training else ""
        origin = (
            f"Trained from {base} by {training['learner'].upper()} {_WHERE[training['environment']]} of the world "
            f"`{training['world']}` ({iterations}seed: {training['seed']})."
        )
    return _CARD.format(
        name=name,
        base_line=f"base_model: {json.dumps(base)}\n" if "/" in base else "",
        origin=origin,
        policy_version=record["policy_version"],
        parameters=record["parameters"],
        created=record["created"],
        release=record["versions"]["dreamgym-lg"],
        data=f"{data['trajectories']:,} real trajectories, {data['steps']:,} steps (SHA-256 `{data['sha256'][:16]}…`)",
        dream=_dream(record["experience_model"]),
        evaluation=_evaluation(record["evaluation"], record.get("baselines", {})),
        served=f"the agent `{agent['path']}` with it" if agent else "it as a chat",
    )


def _dream(experience: Mapping[str, Any] | None) -> str:
    if experience is None:
        return "none"
    return f"`{experience['version']}`" + (f", {ASSISTED}" if experience.get("assisted") else "")


def _evaluation(rows: Sequence[Row], baselines: Mapping[str, Sequence[Row]]) -> str:
    """A table of the policy's evaluations and, below them, of its baselines' on real held-out tasks."""
    if not rows:
        return "This policy was not evaluated on held-out tasks before it was exported."
    lines = ["| policy | environment | tasks | sampling | success | 95 % interval |", "| --- | --- | --- | --- | --- | --- |"]
    compared = [("this one", row) for row in rows]
    for name, others in baselines.items():
        compared += [(_BASELINES[name], row) for row in others if (row["environment"], row["split"]) == ("real", "test")]
    for policy, row in compared:
        low, high = row["interval"]
        success = f"{row['successes']} of {row['episodes']}"
        tasks = f"{row['split']}, {row['panel']}" if row["panel"] else row["split"]
        figures = f"{row['mode'] or 'as set'} | {success} | {low:.0%} to {high:.0%}"
        lines.append(f"| {policy} | {row['environment']} | {tasks} | {figures} |")
    return "\n".join(lines)
