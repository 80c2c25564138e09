"""The alarms of a training run."""

import re
from pathlib import Path
from typing import Any

import pytest

from dreamgym_lg.metrics import check_health, find_breakage, is_collapsed

FINE: dict[str, float] = {"entropy": 0.5, "invalid_action_share": 0.1, "kl": 0.02, "clip_ratio/region_mean": 0.01}


@pytest.mark.parametrize(
    ("figures", "name", "told"),
    [
        ({}, None, ""),
        ({"invalid_action_share": 0.7}, "invalid", "70% of the actions are invalid: show the policy demonstrations"),
        ({"cut_reply_share": 0.41}, "cut", "41% of the policy's replies are cut off: raise policy_tokens"),
        ({"kl": 0.9}, "kl", "KL of 0.90 a token, .*: a larger beta"),
        ({"clip_ratio/region_mean": 0.4}, "clipped", "40% of the tokens are clipped: .* fewer updates"),
        ({"entropy": 0.01}, "entropy", "entropy fell from 0.500 to 0.010, .* harder tasks"),
        (
            {"segments": 90, "rewritten_segments": 60, "episodes": 30, "reread_share": 0.7},
            "split",
            "60 of the 90 segments of 30 episodes read again .* 70% of all tokens. The chat template .*chat_template_kwargs",
        ),
        ({"segments": 90, "rewritten_segments": 20, "episodes": 30, "reread_share": 0.2}, None, ""),
        ({"sampling/sampling_logp_difference/mean": 0.3}, "sampler", "differ by 0.30 a token .*correction=True"),
        ({"entropy": 2.5}, "noise", "entropy rose from 0.50 to 2.50, .* a lower learning_rate"),
    ],
)
def test_every_alarm_says_what_to_do(figures: dict[str, float], name: str | None, told: str) -> None:
    found = check_health([*[FINE] * 3, *[{**FINE, **figures}] * 3])
    assert [alarm.name for alarm in found] == ([name] if name else [])
    assert not found or re.search(told, found[0].text)


def test_splits_are_told_at_once() -> None:
    (alarm,) = check_health([{**FINE, "segments": 8, "rewritten_segments": 4, "episodes": 4, "reread_share": 0.5}])
    assert alarm.name == "split"


def test_a_run_whose_updates_were_skipped_gives_no_alarm() -> None:
    assert check_health([{"invalid_action_share": 0.0}] * 4) == []


def row(reward: float, *, real: bool = False) -> dict[str, float]:
    return {"reward_mean": reward, **({"real_steps": 9} if real else {})}


def test_a_collapse_is_a_lasting_fall_from_what_was_reached() -> None:
    risen = [row(reward) for reward in (0.1, 0.4, 0.6, 0.6)]
    assert is_collapsed([*risen, row(0.1), row(0.1), row(0.1)])
    (alarm,) = check_health([*risen, row(0.1), row(0.1), row(0.1)])
    assert alarm.name == "collapsed" and "below a quarter of the best before: train in a new folder" in alarm.text
    assert not is_collapsed([*risen, row(0.0), row(0.0)]), "it may be two hard draws"
    assert not is_collapsed([*risen, row(0.2), row(0.2), row(0.2)])
    assert not is_collapsed([row(0.05), row(0.05), row(0.05), row(0.0), row(0.0), row(0.0)]), "nothing was reached"
    assert not is_collapsed([*risen, row(0.1, real=True), row(0.1, real=True), row(0.1, real=True)]), "that is reality"


def test_an_alarm_is_told_when_it_begins(process: Any, tmp_path: Path) -> None:
    said: list[str] = []

    def reply(messages: Any) -> str:
        return "open door" if len(messages) == 2 else "go north" if len(messages) > 8 else "dance"

    one = process(tmp_path, reply, stop_after_uniform=0, say=said.append)
    one.run(tmp_path)
    assert [text.partition(":")[0] for text in said if "actions are invalid" in text] == ["iteration 2"]
    assert [row.get("alarm_invalid") for row in one.metrics()] == [None, None, 1, 1]


@pytest.mark.parametrize(
    ("first", "now", "told"),
    [
        ({"cut_reply_share": 0.02}, {"cut_reply_share": 0.9}, "90% of the policy's replies are cut off .* iteration 2%"),
        ({"no_valid_action_share": 0.3}, {"no_valid_action_share": 0.75}, "75% of its episodes have no valid action"),
        ({"cut_reply_share": 0.6}, {"cut_reply_share": 1.0}, None),
        ({"no_valid_action_share": 0.4}, {"no_valid_action_share": 0.75}, None),
        ({}, {"cut_reply_share": 0.5, "no_valid_action_share": 0.5}, None),
        ({}, {"cut_reply_share": 0.9, "real_steps": 40}, None),
    ],
)
def test_one_iteration_tells_a_policy_that_training_broke(first: Any, now: Any, told: str | None) -> None:
    found = find_breakage([first, now], now)
    assert re.search(told, found) if told else found == "", "not what the start policy did, and not in another place"
