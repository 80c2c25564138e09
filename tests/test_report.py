import json
import math
import random
import re
import struct
import sys
import zlib
from base64 import b64decode
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from rich.console import Console

from dreamgym_lg.errors import MissingDependency
from dreamgym_lg.report import EPISODES_SHOWN, summary_table, write_report
from dreamgym_lg.statistics import wilson
from dreamgym_lg.types import Step, Task, Trajectory


def measured(successes, episodes, invalid=0.05):
    interval = list(wilson(successes, episodes))
    return {"successes": successes, "episodes": episodes, "interval": interval, "invalid_action_share": invalid}


def make_result(**changes):
    return {
        "game": "peckingorder",
        "seed": 1,
        "version": "0.1.0",
        "iterations": 60,
        "real": {
            "base": {"greedy": measured(16, 120, 0.31), "sampled": measured(3, 120, 0.42)},
            "trained": {"greedy": measured(101, 120, 0.02), "sampled": measured(94, 120, 0.07)},
        },
        "dream": {
            "base": {"greedy": measured(20, 120), "sampled": measured(5, 120)},
            "trained": {"greedy": measured(108, 120), "sampled": measured(103, 120)},
        },
        "real_steps": {"offline": 51234, "refresh": 0, "evaluation": 4012},
        "seconds": {"collect": 41.0, "experience": 620.0, "base": 180.0, "train": 2900.0, "evaluate": 240.0},
        "settings": {"learning_rate": 3e-4, "num_generations": 8, "episodes": {"noisy": 2500}, "nothing": None},
    } | changes


def make_metrics(iterations=60):
    rng, metrics = random.Random(0), []
    for i in range(iterations):
        share = 0.03 + 0.86 / (1 + math.exp((25 - i) / 7))
        metrics.append(
            {
                "iteration": i,
                "dream_success": min(1.0, max(0.0, share + rng.gauss(0, 0.06))),
                "uniform_groups": abs(share - 0.45),
                "curriculum_value": share * (1 - share),
                "invalid_action_share": 0.4 * (1 - share),
                "entropy": 0.2 + 1.6 * math.exp(-i / 30),
                "seconds_curriculum": 0.4,
                "seconds_rollout": 30.0,
                "seconds_update_policy": 15.0,
            }
        )
        if i % 15 == 14:
            metrics[-1] |= {
                "eval_real_successes": round(37 * share),
                "eval_real_episodes": 40,
                "eval_dream_successes": round(40 * share),
                "eval_dream_episodes": 40,
                "eval_invalid_recall": 0.88 if i < 40 else None,
                "eval_invalid_count": 33 if i < 40 else 0,
                "seconds_evaluate": 24.0,
            }
    return metrics


def make_episode(**changes):
    steps = (
        Step(observation="You see an egg.", action="take egg", next_observation="Taken.", reasoning="It is in reach."),
        Step(observation="Taken.", action="fly", next_observation="I do not know that.", valid=False),
        Step(observation="?", action="give egg to hen", next_observation="Won!", reward=1.0, terminated=True),
    )
    task = Task(id="peckingorder/7", instruction="Serve the hens in order.", environment="peckingorder")
    return Trajectory(**{"task": task, "steps": steps, "source": "synthetic", "success": True} | changes)


def render(tmp_path, result=None, metrics=(), episodes=()):
    html, png = write_report(make_result() if result is None else result, metrics, episodes, tmp_path / "out")
    assert (html, png) == (tmp_path / "out/report.html", tmp_path / "out/report.png")
    return html.read_text(encoding="utf-8")


class Page(HTMLParser):
    """Tags with their attributes, and table rows as lists of cell texts."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.rows, self.text, self.inside = [], [], "", False
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.inside = False

    def handle_data(self, data):
        self.text += data
        if self.inside:
            self.rows[-1][-1] += data

    def row(self, *start):
        return next(row for row in self.rows if row[: len(start)] == list(start))


def check_png(data):
    """Whole (every chunk's checksum holds) and of the promised size."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1600, 1000)
    place = 8
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        body = data[place + 4 : place + 8 + length]
        assert zlib.crc32(body) == struct.unpack(">I", data[place + 8 + length : place + 12 + length])[0]
        place += 12 + length
    assert body == b"IEND"


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_headline_gives_the_numbers_and_the_verdict(tmp_path):
    page = Page(render(tmp_path))

    assert "Trained in a dream, proven in the real environment: peckingorder, seed 1" in page.text
    sentence = "Real success (temperature 1): 0.03 [0.01, 0.07] → 0.78 [0.70, 0.85] on 120 held-out episodes"
    assert f"{sentence}; 0 real steps spent in training" in page.text
    assert "Real success (greedy): 0.13 [0.08, 0.21] → 0.84 [0.77, 0.90] on 120 held-out episodes\n" in page.text
    assert page.text.count("proven: the intervals do not overlap") == 2


def test_the_results_table_equals_the_result(tmp_path):
    result = make_result()
    page = Page(render(tmp_path, result))

    for policy in ("base", "trained"):
        for mode, name in (("greedy", "greedy"), ("sampled", "temperature 1")):
            real, dream = result["real"][policy][mode], result["dream"][policy][mode]
            assert page.row(policy, name)[2:] == [
                f"{real['successes'] / 120:.2f} [{real['interval'][0]:.2f}, {real['interval'][1]:.2f}]",
                f"{real['successes']}/120",
                f"{dream['successes'] / 120:.2f} [{dream['interval'][0]:.2f}, {dream['interval'][1]:.2f}]",
                f"{dream['successes']}/120",
                f"{(dream['successes'] - real['successes']) / 120:+.2f}",
                f"{real['invalid_action_share']:.0%}",
            ]


def test_steps_time_and_settings_equal_the_result(tmp_path):
    page = Page(render(tmp_path, metrics=make_metrics()))

    assert page.row("offline")[1] == "51,234"
    assert page.row("in training")[1] == "0"
    assert page.row("evaluation")[1] == "4,012"
    assert page.row("train")[1] == "48 min"
    assert page.row("training: rollout")[1:] == ["30 min", "64%"]
    assert page.row("learning_rate")[1] == "0.0003"
    assert page.row("episodes")[1] == "{'noisy': 2500}"
    assert page.row("nothing")[1] == "–"


def test_evaluations_during_training_with_gap_and_recall(tmp_path):
    metrics = [
        {"iteration": 14, "eval_real_successes": 8, "eval_real_episodes": 40, "eval_dream_successes": 14}
        | {"eval_dream_episodes": 40, "eval_invalid_recall": 0.75, "eval_invalid_count": 12},
        {"iteration": 29, "eval_real_successes": 30, "eval_real_episodes": 40}
        | {"eval_invalid_recall": None, "eval_invalid_count": 0},
        {"iteration": 30, "dream_success": 0.5},
    ]
    page = Page(render(tmp_path, metrics=metrics))

    assert page.row("14") == ["14", "0.20 [0.10, 0.35]", "8/40", "0.35 [0.22, 0.50]", "14/40", "+0.15", "0.75 of 12"]
    assert page.row("29") == ["29", "0.75 [0.60, 0.86]", "30/40", "–", "–", "–", "– of 0"]
    assert not [row for row in page.rows if row[0] == "30"]


def test_unseen_objects_get_a_row_and_a_verdict_of_their_own(tmp_path):
    trained = {"greedy": measured(14, 60), "sampled": measured(9, 60)}
    transfer = {"base": {"greedy": measured(10, 60)}, "trained": trained}
    page = Page(render(tmp_path, make_result(transfer=transfer)))

    assert page.row("trained", "greedy, unseen objects")[2:4] == ["0.23 [0.14, 0.35]", "14/60"]
    assert "(greedy, unseen objects): 0.17 [0.09, 0.28] → 0.23 [0.14, 0.35] on 60 held-out episodes" in page.text
    assert "not proven: the intervals overlap" in page.text
    assert "not proven: base and trained policy were not both played" in page.text, "sampled has no base"
    assert "Trained in a dream, proven" in page.text, "the headline is the held-out worlds'"


# --- what must not be claimed -----------------------------------------------------------------------------------------


def with_sampled(base, trained):
    return make_result(real={"base": {"sampled": base}, "trained": {"sampled": trained}})


def test_overlapping_intervals_are_called_not_proven(tmp_path):
    page = Page(render(tmp_path, with_sampled(measured(10, 40), measured(15, 40))))

    assert "Trained in a dream, not proven in the real environment" in page.text
    assert "not proven: the intervals overlap" in page.text
    assert "proven in" not in page.text.replace("not proven in", "")


def test_a_loss_is_called_worse(tmp_path):
    page = Page(render(tmp_path, with_sampled(measured(110, 120), measured(10, 120))))

    assert "Trained in a dream, worse in the real environment" in page.text
    assert "worse: the intervals do not overlap" in page.text


def test_the_given_interval_decides_and_need_not_hold_the_rate(tmp_path):
    page = Page(render(tmp_path, with_sampled(measured(0, 100) | {"interval": [0.02, 0.8]}, measured(81, 100))))

    assert "0.00 [0.02, 0.80] → 0.81 [0.72, 0.87]" in page.text
    assert "not proven: the intervals overlap" in page.text


def test_different_numbers_of_episodes_are_both_named(tmp_path):
    page = Page(render(tmp_path, with_sampled(measured(1, 100), measured(40, 50))))

    assert "on 100 and 50 held-out episodes" in page.text


def test_real_steps_spent_in_training_are_named(tmp_path):
    page = Page(render(tmp_path, make_result(real_steps={"refresh": 2345})))

    assert "; 2,345 real steps spent in training" in page.text
    assert "real steps spent" not in Page(render(tmp_path, make_result(real_steps=None))).text


def test_zero_episodes_prove_nothing(tmp_path):
    page = Page(render(tmp_path, with_sampled(measured(0, 0), measured(5, 5))))

    assert "not proven: base and trained policy were not both played" in page.text
    assert page.row("base", "temperature 1")[2:4] == ["–", "–"]


def test_an_empty_result_without_metrics_and_episodes(tmp_path):
    page = Page(render(tmp_path, {}))

    assert "not proven" in page.text
    assert page.text.count("Not recorded.") == 3
    check_png((tmp_path / "out/report.png").read_bytes())


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -0.5, 1.5, "0.5", True])
def test_impossible_metrics_are_left_out(tmp_path, value):
    metrics = [{"iteration": 0} | dict.fromkeys(("dream_success", "uniform_groups", "invalid_action_share"), value)]
    metrics[0] |= {"curriculum_value": value, "entropy": value, "eval_real_successes": 41, "eval_real_episodes": 40}
    page = Page(render(tmp_path, metrics=[*metrics, {"iteration": None}, {"dream_success": 0.5}]))

    assert "Evaluations during training\nNot recorded." in page.text


def test_order_and_repetition_of_metrics_do_not_matter(tmp_path):
    metrics = make_metrics(30)
    sorted_page = render(tmp_path, metrics=metrics)

    assert render(tmp_path, metrics=[metrics[5] | {"dream_success": 0.0}, *reversed(metrics)]) == sorted_page


# --- the page stands alone and is inert -------------------------------------------------------------------------------


def test_text_from_episodes_settings_and_result_is_inert(tmp_path):
    attack = "<script>alert(1)</script><img src=//evil.example/x onerror=alert(1)>\"'>{{ 7 * 7 }}"
    step = Step(observation=attack, action=attack, next_observation=attack, reasoning=attack)
    task = Task(id=attack, instruction=attack, environment="e")
    episode = Trajectory(task=task, steps=(step,), policy_version=attack, error=attack, source="real")
    result = make_result(game=attack, version=attack, settings={attack: attack}, seconds={attack: 1.0})
    page = Page(render(tmp_path, result, make_metrics(3), [episode]))

    names = [name for name, _ in page.tags]
    assert "script" not in names
    assert names.count("img") == 1
    assert not [attribute for _, attributes in page.tags for attribute in attributes if attribute.startswith("on")]
    assert page.text.count(attack) >= 10, "shown as it is"
    assert "49" not in re.sub(r"base64,[^\"]+", "", render(tmp_path, make_result(game="{{ 7 * 7 }}")))


def test_the_page_asks_for_nothing(tmp_path):
    source = render(tmp_path, metrics=make_metrics(), episodes=[make_episode()])
    page = Page(source)

    assert "http://" not in source and "https://" not in source
    assert "@import" not in source and "url(" not in source
    references = [value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "href")]
    assert len(references) == 1
    assert references[0].startswith("data:image/png;base64,")
    assert not {name for name, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "base", "form"}


def test_the_picture_is_whole_and_the_same_in_page_and_file(tmp_path):
    source = render(tmp_path, metrics=make_metrics())
    png = (tmp_path / "out/report.png").read_bytes()

    check_png(png)
    assert b64decode(re.search(r'base64,([^"]+)"', source)[1]) == png


def test_the_picture_has_a_white_background_whatever_style_the_user_has(tmp_path):
    import matplotlib
    from matplotlib.image import imread

    with matplotlib.rc_context({"figure.facecolor": "black", "savefig.facecolor": "black", "axes.facecolor": "black"}):
        render(tmp_path, metrics=make_metrics())
        assert matplotlib.rcParams["axes.facecolor"] == "black", "and the user's style is left alone"
    pixels = imread(tmp_path / "out/report.png")
    assert (pixels[[0, 0, -1, -1], [0, -1, 0, -1], :3] == 1).all()
    assert (pixels[..., :3] == 1).all(axis=-1).mean() > 0.8


def test_a_long_name_stays_inside_the_picture(tmp_path):
    from matplotlib.image import imread

    render(tmp_path, make_result(game="a game with a name that is much too long for one line " * 2))
    assert (imread(tmp_path / "out/report.png")[:, -10:, :3] == 1).all()


def test_one_iteration_and_one_evaluation(tmp_path):
    render(tmp_path, metrics=make_metrics(15)[-1:])
    check_png((tmp_path / "out/report.png").read_bytes())


def test_the_same_input_gives_the_same_files(tmp_path):
    first = render(tmp_path / "a", metrics=make_metrics(), episodes=[make_episode()])

    assert render(tmp_path / "b", metrics=make_metrics(), episodes=[make_episode()]) == first


# --- episodes ---------------------------------------------------------------------------------------------------------


def test_an_episode_step_by_step(tmp_path):
    page = Page(render(tmp_path, episodes=[make_episode(policy_version="checkpoint-60")]))
    summary = " ".join(page.text[page.text.index("dream · peckingorder/7") :].split())

    assert summary.startswith("dream · peckingorder/7 · checkpoint-60 · success · reward 1.00 · 3 steps · 1 invalid")
    for text in ("Serve the hens in order.", "You see an egg.", "It is in reach.", "I do not know that.", "terminated"):
        assert text in page.text
    assert re.search(r"fly reward 0\.00\s+invalid", page.text)
    assert [attributes for name, attributes in page.tags if name == "details"] == [{}], "collapsed"


def test_a_failed_episode_without_a_step(tmp_path):
    failed = make_episode(steps=(), success=False, error="PredictionFailed: no JSON", source="offline")
    page = Page(render(tmp_path, episodes=[failed]))

    assert "recorded, real environment" in page.text
    assert "PredictionFailed: no JSON" in page.text
    assert "failed" in page.text


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
    assert "proven: the intervals do not overlap" in printed(make_result())


def test_summary_table_of_an_empty_result_and_of_names_that_look_like_markup():
    assert "not proven" in printed({})
    assert "[bold]game[/x]" in printed(make_result(game="[bold]game[/x]"))


def test_a_result_read_back_from_json_gives_the_same_page(tmp_path):
    source = render(tmp_path)

    assert render(tmp_path, json.loads(json.dumps(make_result()))) == source


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_is_named_and_nothing_is_written(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(MissingDependency, match=rf"{package} is not installed.*'dreamgym-lg\[report\]'"):
        write_report(make_result(), [], [], tmp_path / "out")
    assert not (tmp_path / "out").exists()
