import json
import math
import random
import re
import sys
from dataclasses import replace

import pytest
from report_parts import Page, make_episode, make_metrics, make_result, measured, picture, render
from rich.console import Console

from dreamgym_lg.errors import MissingDependency
from dreamgym_lg.report.proof import ASSISTED, ENOUGH, EPISODES_SHOWN, LABELS, read_claim, summary_table, write_report
from dreamgym_lg.types import Act, Step

# --- what must not be claimed -----------------------------------------------------------------------------------------


def with_sampled(base, trained):
    return make_result(real={"base": {"sampled": base}, "trained": {"sampled": trained}})


@pytest.mark.slow
def test_a_gain_whose_interval_holds_0_is_called_not_proven(tmp_path):
    page = Page(render(tmp_path, with_sampled(measured(10, 40), measured(12, 40))))

    assert "Trained in a dream, not proven in the real environment" in page.text
    assert "not proven: trained − imitation of every success +0.05 [-0.03, +0.13], paired on 40 tasks" in page.text
    assert "proven in" not in page.text.replace("not proven in", "")


@pytest.mark.parametrize(
    ("filtered", "trained", "word", "why"),
    [
        (30, 115, "proven", "trained − filtered imitation, no dream +0.71 [+0.61, +0.78], paired on 120 tasks"),
        (110, 113, "not proven", "trained − filtered imitation, no dream +0.03 [-0.01, +0.06], paired on 120 tasks"),
        (115, 60, "worse", "trained − filtered imitation, no dream -0.46 [-0.54, -0.36], paired on 120 tasks"),
        (2, 60, "proven", "trained − imitation of every success +0.42 [+0.32, +0.50], paired on 120 tasks"),
    ],
)
def test_a_dream_is_proven_by_what_it_adds_to_the_better_baseline(tmp_path, filtered, trained, word, why):
    result = with_sampled(measured(10, 120), measured(trained, 120)) | {"filtered": 251}
    result["real"]["filtered"] = {"sampled": measured(filtered, 120)}
    page = Page(render(tmp_path, result))

    enough = ENOUGH if trained < filtered else ""
    assert f"rained in a dream, {word} in the real environment" in page.text
    assert f"\n{word}: {why}{enough and f'; {enough}'}\n" in page.text
    assert page.row("filtered imitation, no dream", "temperature 1")[3:5] == [f"{filtered}/120", "–"]
    assert f"on 120 held-out episodes: {LABELS['base']} 0.08 [" in page.text
    assert f"→ filtered imitation, no dream {filtered / 120:.2f} [" in page.text
    assert "Filtered: imitates the 251 best recorded episodes, no dream." in page.text


def test_with_drawn_tasks_their_imitation_is_a_baseline_and_what_it_adds_is_said(tmp_path):
    result = with_sampled(measured(10, 120), measured(100, 120)) | {"filtered": 0, "drawn": 9}
    assert read_claim(result).why == "imitation of the drawn tasks was not played"
    result["real"]["drawn"] = {"sampled": measured(118, 120)}
    claim = read_claim(result)
    assert (claim.word, claim.baseline, claim.enough) == ("worse", "drawn", True)
    adds = read_claim(result | {"offline_rl": ""}, policy="drawn")
    assert adds.word == "proven" and adds.why.startswith("imitation of drawn tasks too − imitation of every success +0.90")
    text = Page(render(tmp_path, result | {"offline_rl": "", "began": "drawn"})).text
    assert "Training began with the imitation of drawn tasks too." in text
    assert f"What imitation of drawn tasks adds before any dream (temperature 1)\nproven: {adds.why}" in text


def test_sim_to_real_tells_what_the_dream_and_what_the_real_part_add(tmp_path):
    result = with_outcomes(base=[1] * 20 + [0] * 100, dreamed=[1] * 80 + [0] * 40, trained=[1] * 82 + [0] * 38)
    result["settings"] = {"environment": "s2r"}
    assert read_claim(result).why.startswith("trained − imitation of every success +0.52"), "the dreamed part is no baseline"
    page = Page(render(tmp_path, result))
    assert page.row("dream, before the real part", "temperature 1")[3] == "80/120"
    dream, real = (
        "dream, before the real part − imitation of every success +0.50",
        "trained − dream, before the real part +0.02",
    )
    assert f"What the dream adds before the real part (temperature 1)\nproven: {dream}" in page.text
    assert f"What the real part adds to the dream (temperature 1)\nnot proven: {real}" in page.text
    assert "What the" not in Page(render(tmp_path, make_result())).text


def test_where_imitation_is_as_good_it_is_enough(tmp_path):
    """Issue 46: base 104, imitated 136, dream 135 of 150 printed "Trained in a dream, proven"."""
    result = with_sampled(measured(104, 150), measured(135, 150)) | {"filtered": 251}
    result["real"]["filtered"] = {"sampled": measured(136, 150)}
    page, claim = Page(render(tmp_path, result)), read_claim(result)

    assert claim.enough and (claim.word, claim.baseline) == ("not proven", "filtered")
    assert "Imitation is enough; trained in a dream, not proven" in page.text
    assert ENOUGH in str(summary_table(result).caption)


def test_nobody_is_told_by_a_few_tasks_that_imitation_is_enough():
    """Issue 48: on two tickets it said so."""
    for tasks, enough in ((2, False), (19, False), (20, True)):
        result = with_sampled(measured(tasks, tasks), measured(1, tasks))
        assert read_claim(result).enough == enough
        shared = dict.fromkeys([*result["real"]["base"]["sampled"]["outcomes"]][1:], "K12")
        assert not read_claim(result | {"shared_entities": shared}).enough, "one task is left that counts"
    assert not read_claim(result, policy="trained", before="start").enough


def test_before_a_training_no_policy_is_enough():
    result = make_result(real={"start": {"sampled": measured(2, 30)}, "base": {"sampled": measured(20, 30)}})
    result["real"]["offline_rl"] = {"sampled": measured(19, 30)}
    assert not read_claim(result | {"offline_rl": "DPO"}, policy="offline_rl", before="start").enough


def test_offline_rl_is_a_baseline_like_the_others(tmp_path):
    result = with_sampled(measured(40, 120), measured(90, 120))
    result["real"]["offline_rl"] = {"sampled": measured(100, 120)}
    claim = read_claim(result | {"offline_rl": "DPO on 12 pairs"})
    assert (claim.baseline, claim.enough) == ("offline_rl", True) and "trained − offline RL, no dream -0.08" in claim.why
    page = Page(render(tmp_path, result | {"offline_rl": "DPO on 12 pairs"}))
    assert page.row("offline RL, no dream", "temperature 1")[3] == "100/120" and "Offline RL: DPO on 12 pairs." in page.text
    for how in (None, "DPO on 12 pairs"):
        assert "offline RL on the same data was not played" in read_claim(make_result(offline_rl=how)).why


@pytest.mark.parametrize(("start", "word", "enough"), [(89, "not proven", False), (30, "proven", False), (110, "worse", False)])
def test_the_weights_before_any_training_are_a_stage_and_need_no_dream_either(tmp_path, start, word, enough):
    result = with_sampled(measured(40, 120), measured(90, 120))
    result["real"]["start"] = {"sampled": measured(start, 120)}
    page, claim = Page(render(tmp_path, result)), read_claim(result)

    assert page.row("start, untrained", "temperature 1")[3] == f"{start}/120"
    assert f"on 120 held-out episodes: start, untrained {start / 120:.2f} [" in page.text
    assert (claim.word, claim.baseline, claim.enough) == (word, "base", enough)
    assert ("trained − start, untrained" in claim.why) == (start > 40)


def with_outcomes(**policies):
    """A result of these outcomes, a list for each policy: the same tasks in the same order."""
    real = {
        name: {"sampled": measured(sum(won), len(won)) | {"outcomes": dict(enumerate(map(bool, won)))}}
        for name, won in policies.items()
    }
    return make_result(real=real, filtered=251 if "filtered" in policies else 0)


def test_the_same_tasks_are_compared_in_pairs():
    """12 tasks won by one policy alone, and none by the other, tell what two rates do not."""
    base, trained = [1] * 50 + [0] * 70, [1] * 62 + [0] * 58
    claim = read_claim(with_outcomes(base=base, trained=trained))
    assert claim.word == "proven" and "+0.10 [+0.04, +0.15], paired on 120 tasks" in claim.why
    elsewhere = measured(62, 120) | {"outcomes": {f"other {number}": True for number in range(120)}}
    claim = read_claim(with_sampled(measured(50, 120), elsewhere))
    assert claim.word == "not proven" and claim.why == "trained and imitation of every success played no task in common"
    shuffled = read_claim(with_outcomes(base=base, trained=trained[::-1]))
    assert shuffled.word == "not proven", "the same rates, on other tasks each"


def test_held_out_tasks_that_share_an_entity_with_training_tasks_prove_nothing(tmp_path):
    outcomes = {"base": [0] * 120, "trained": [1] * 30 + [0] * 90}
    result, shared = with_outcomes(**outcomes), [dict.fromkeys(range(number), "anna berg") for number in (5, 30, 120)]
    claims = [read_claim(result | {"shared_entities": each}) for each in shared]
    assert [claim.word for claim in claims] == ["proven", "not proven", "not proven"]
    told = "held-out tasks share an entity or all words with training tasks"
    assert claims[0].why.endswith(f"+0.22 [+0.14, +0.29], paired on 115 tasks; 5 of 120 {told} and do not count")
    assert claims[2].why == f"120 of 120 {told}"
    source = render(tmp_path, result | {"shared_entities": shared[1]})
    assert "Trained in a dream, not proven" in Page(source).text and "training task: 0 (anna berg)." in Page(source).text
    assert "anna" not in claims[1].verdict, "a model card has no text of the traces"


def test_the_best_baseline_is_the_best_on_the_tasks_that_count():
    """A baseline that knows the shared tasks by heart was the opponent."""
    result = with_outcomes(
        base=[1] * 20 + [1] * 4 + [0] * 16, filtered=[1] * 4 + [0] * 16 + [1] * 16 + [0] * 4, trained=[1] * 34 + [0] * 6
    )
    assert read_claim(result).baseline == "base"
    claim = read_claim(result | {"shared_entities": dict.fromkeys(range(20), "k1")})
    assert claim.baseline == "filtered" and claim.word == "not proven" and "-0.10" in claim.why and claim.enough


@pytest.mark.parametrize("spread", [0.0, 0.2, 0.4])
@pytest.mark.parametrize("filtered", [False, True])
def test_a_study_without_a_difference_proves_one_in_twenty_at_most(spread, filtered):
    """1,000 simulated experiments: policies of the same success on tasks of different difficulty."""
    rng, proven = random.Random(f"{spread}/{filtered}"), 0
    for _ in range(1000):
        rates = [rng.uniform(0.6 - spread, 0.6 + spread) for _ in range(120)]
        names = ("base", "filtered", "trained") if filtered else ("base", "trained")
        played = {name: [rng.random() < rate for rate in rates] for name in names}
        proven += read_claim(with_outcomes(**played)).word == "proven"
    assert proven <= 50


def test_without_filtered_imitation_nothing_is_proven_unless_there_was_nothing_to_filter(tmp_path):
    for imitated in (None, 251):
        page = Page(render(tmp_path, make_result(filtered=imitated)))
        assert "Trained in a dream, not proven in the real environment" in page.text
        assert page.text.count("not proven: filtered imitation of the same data was not played") == 2
    page = Page(render(tmp_path, make_result(filtered=0)))
    assert "Trained in a dream, proven" in page.text and "the successes are the best recorded episodes" in page.text


def test_a_loss_is_called_worse(tmp_path):
    page = Page(render(tmp_path, with_sampled(measured(110, 120), measured(10, 120))))

    assert "trained in a dream, worse in the real environment" in page.text
    assert "worse: trained − imitation of every success -0.83 [" in page.text


def test_the_given_interval_is_shown_and_need_not_hold_the_rate(tmp_path):
    page = Page(render(tmp_path, with_sampled(measured(0, 100) | {"interval": [0.02, 0.9]}, measured(81, 100))))

    assert "0.00 [0.02, 0.90] → trained 0.81 [0.72, 0.87]" in page.text


def test_different_numbers_of_episodes_are_both_named(tmp_path):
    page = Page(render(tmp_path, with_sampled(measured(1, 100), measured(40, 50))))

    assert "on 100 and 50 held-out episodes" in page.text


def test_real_steps_spent_in_training_are_named(tmp_path):
    page = Page(render(tmp_path, make_result(real_steps={"train": 2345})))

    assert "; 2,345 real steps spent in training" in page.text
    assert "real steps spent" not in Page(render(tmp_path, make_result(real_steps=None))).text


def test_zero_episodes_prove_nothing(tmp_path):
    page = Page(render(tmp_path, with_sampled(measured(0, 0), measured(5, 5))))

    assert "not proven: imitation of your traces and the trained policy were not both played" in page.text
    assert page.row("base", "temperature 1")[2:4] == ["–", "–"]


def test_an_empty_result_without_metrics_and_episodes(tmp_path, drawn):
    source = render(tmp_path, {})
    page = Page(source)

    assert "not proven" in page.text
    assert page.text.count("Not recorded.") == 3
    picture(source)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -0.5, 1.5, "0.5", True])
def test_impossible_metrics_are_left_out(tmp_path, drawn, value):
    metrics = [{"iteration": 0} | dict.fromkeys(("train_success", "uniform_groups", "invalid_action_share"), value)]
    metrics[0] |= {"curriculum_value": value, "entropy": value, "eval_real_successes": 41, "eval_real_episodes": 40}
    page = Page(render(tmp_path, metrics=[*metrics, {"iteration": None}, {"train_success": 0.5}]))

    assert "Evaluations during training\nNot recorded." in page.text


@pytest.mark.slow
def test_order_and_repetition_of_metrics_do_not_matter(tmp_path, drawn):
    metrics = make_metrics(30)
    sorted_page = render(tmp_path, metrics=metrics)

    assert render(tmp_path, metrics=[metrics[5] | {"train_success": 0.0}, *reversed(metrics)]) == sorted_page


# --- episodes ---------------------------------------------------------------------------------------------------------


def test_an_episode_step_by_step(tmp_path):
    page = Page(render(tmp_path, episodes=[make_episode(policy_version="checkpoint-60")]))
    summary = " ".join(page.text[page.text.index("dream · peckingorder/7") :].split())

    assert summary.startswith("dream · peckingorder/7 · checkpoint-60 · success · reward 1.00 · 3 steps · 1 invalid")
    for text in ("Serve the hens in order.", "You see an egg.", "It is in reach.", "I do not know that.", "terminated"):
        assert text in page.text
    assert re.search(r"fly reward 0\.00\s+invalid", page.text)
    assert [attributes for name, attributes in page.tags if name == "details"] == [{}], "collapsed"


def test_what_an_agents_code_did_stands_between_the_steps_of_a_failed_episode_too(tmp_path):
    acts = (
        Act("passed through", 1, "note()", "noted", "my_app.py:7 in note"),
        Act("blocked", 3, "os.remove of orders.db", line="my_app.py:9 in act"),
    )
    whole = make_episode()
    failed = make_episode(steps=[replace(step, line="my_app.py:5 in give") for step in whole.steps], acts=acts, error="stopped")
    text = " ".join(Page(render(tmp_path, episodes=[failed])).text.split())
    parts = ("take egg", "my_app.py:5 in give", "passed through: note() my_app.py:7 in note noted", "fly")
    places = [text.find(part) for part in (*parts, "Won!", "blocked: os.remove of orders.db my_app.py:9 in act")]
    assert -1 not in places and places == sorted(places), text


def test_a_failed_episode_without_a_step(tmp_path):
    failed = make_episode(steps=(), success=False, error="PredictionFailed: no JSON", source="offline")
    page = Page(render(tmp_path, episodes=[failed]))

    assert "recorded, real environment" in page.text
    assert "PredictionFailed: no JSON" in page.text
    assert "no success (unreadable answer)" in page.text


def test_half_a_surrogate_pair_is_written(tmp_path):
    step = Step(observation="a", action="b", next_observation="half \ud83d done")

    assert "half ? done" in render(tmp_path, episodes=[make_episode(steps=(step,))])


def test_too_many_episodes_are_cut_and_counted(tmp_path):
    page = Page(render(tmp_path, episodes=[make_episode()] * (EPISODES_SHOWN + 3)))

    assert sum(name == "details" for name, _ in page.tags) == EPISODES_SHOWN
    assert f"The first {EPISODES_SHOWN} of {EPISODES_SHOWN + 3} episodes." in page.text


# --- terminal, JSON, missing packages ---------------------------------------------------------------------------------


def printed(result):
    console = Console(width=140, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(summary_table(result))
    return capture.get()


def test_summary_table():
    lines = printed(make_result()).splitlines()
    row = next(line for line in lines if "trained" in line and "temperature 1" in line)

    assert [cell.strip() for cell in row.strip("│ ").split("│")] == [
        "trained", "temperature 1", "0.78 [0.70, 0.85]", "0.86 [0.78, 0.91]", "+0.07", "7%",
    ]  # fmt: skip
    assert "proven: trained − imitation of every success +0.76" in printed(make_result())


def test_summary_table_of_an_empty_result_and_of_names_that_look_like_markup():
    assert "not proven" in printed({})
    assert "[bold]game[/x]" in printed(make_result(world="[bold]game[/x]"))


def test_a_result_read_back_from_json_gives_the_same_page(tmp_path):
    source = render(tmp_path)

    assert render(tmp_path, json.loads(json.dumps(make_result()))) == source


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_is_named_and_nothing_is_written(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(MissingDependency, match=rf"{package} is not installed.*'\.\[report\]'"):
        write_report(make_result(), [], [], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("real", "the real environment"),
        ("s2r", "a dream, then the real environment"),
        ("dream+real", "a dream and the real environment in turn"),
    ],
)
def test_the_title_says_where_it_trained(tmp_path, place, told):
    page = Page(render(tmp_path, result=make_result(settings={"environment": place})))
    assert f"Trained in {told}, proven in the real environment" in page.text


@pytest.mark.parametrize(("place", "where"), [("dream", "a dream {}"), ("s2r", "a dream {}, then the real environment")])
def test_a_dream_that_the_worlds_rules_assist_is_named_so_wherever_the_result_is(tmp_path, place, where):
    result = make_result(settings={"environment": place}, assisted=True)
    title = f"Trained in {where.format(ASSISTED)}, proven in the real environment"
    assert title in Page(render(tmp_path, result=result)).text and title in str(summary_table(result).title)
    assert ASSISTED not in Page(render(tmp_path, result=make_result(assisted=False))).text
