import re
from io import BytesIO

import pytest
from report_parts import Page, make_episode, make_metrics, make_result, picture, render

from dreamgym_lg.simulate.wall import kernel
from dreamgym_lg.simulate.wall.wall import promises_of
from dreamgym_lg.types import Step, Task, Trajectory

# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_headline_gives_the_numbers_and_the_verdict(tmp_path):
    page = Page(render(tmp_path))

    assert "Trained in a dream, proven in the real environment: peckingorder, seed 1" in page.text
    stages = "imitation of every success 0.03 [0.01, 0.07] → trained 0.78 [0.70, 0.85]"
    sentence = f"Real success (temperature 1) on 120 held-out episodes: {stages}"
    assert f"{sentence}; 0 real steps spent in training" in page.text
    stages = "imitation of every success 0.13 [0.08, 0.21] → trained 0.84 [0.77, 0.90]"
    assert f"Real success (greedy) on 120 held-out episodes: {stages}\n" in page.text
    assert page.text.count("proven: trained − imitation of every success +0.7") == 2


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


def test_why_a_training_ended_early(tmp_path):
    metrics = make_metrics(3)
    metrics[2]["end_cause"] = "the policy is broken: <90%>"
    assert "It ended early: the policy is broken: <90%>." in Page(render(tmp_path, metrics=metrics)).text
    assert "It ended early" not in Page(render(tmp_path, metrics=[*metrics, {"iteration": 3}])).text, "it went on"


def test_who_answered_the_dreamed_steps_and_how_fast(tmp_path):
    steps = {"decided_by": {"model": 900, "recorded": 300, "": 800, "<mine>": 0}, "seconds": 400.0}
    told = "2,000 dreamed steps, 5.0 a second with the policy's replies; answered by: "
    text = Page(render(tmp_path, make_result(dreamed_steps=steps))).text
    assert f"{told}the experience model 75%, a recorded answer 25%, <mine> 0%." in text
    for none in (None, {}, {"decided_by": {}, "seconds": 0}):
        assert "dreamed steps" not in Page(render(tmp_path, make_result(dreamed_steps=none))).text


def test_evaluations_during_training_with_their_gap(tmp_path):
    metrics = [
        {"iteration": 14, "eval_real_successes": 8, "eval_real_episodes": 40, "eval_dream_successes": 14}
        | {"eval_dream_episodes": 40},
        {"iteration": 29, "eval_real_successes": 30, "eval_real_episodes": 40},
        {"iteration": 30, "train_success": 0.5},
    ]
    page = Page(render(tmp_path, metrics=metrics))

    assert page.row("14") == ["14", "0.20 [0.10, 0.35]", "8/40", "0.35 [0.22, 0.50]", "14/40", "+0.15"]
    assert page.row("29") == ["29", "0.75 [0.60, 0.86]", "30/40", "–", "–", "–"]
    assert not [row for row in page.rows if row[0] == "30"]


def test_the_gap_is_that_of_the_tasks_played_in_both_places(tmp_path):
    """With `real_budget` the dream plays all validation tasks, and reality the first few."""
    counts = {"eval_real_successes": 4, "eval_real_episodes": 4, "eval_dream_successes": 8, "eval_dream_episodes": 32}
    metrics = [{"iteration": 1, **counts, "eval_gap": -0.25}, {"iteration": 2, **counts, "eval_gap": "much"}]
    page = Page(render(tmp_path, metrics=metrics))

    assert [page.row(iteration)[-1] for iteration in "12"] == ["-0.25", "–"]


def test_success_stands_beside_the_real_steps_spent_by_then(tmp_path):
    rates = {"eval_real_successes": 8, "eval_real_episodes": 40}
    metrics = [{"iteration": 0}, {"iteration": 1, "real_steps": 700, **rates}, {"iteration": 2}]
    metrics.append({"iteration": 3, "real_steps": 800, **rates})
    page = Page(render(tmp_path, metrics=metrics))

    assert [page.row(iteration)[-1] for iteration in "13"] == ["700", "1,500"]
    assert "real steps so far" not in Page(render(tmp_path, metrics=[{"iteration": 1, **rates}])).text


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


def test_the_picture_has_a_white_background_whatever_style_the_user_has(tmp_path, drawn):
    import matplotlib
    from matplotlib.image import imread

    with matplotlib.rc_context({"figure.facecolor": "black", "savefig.facecolor": "black", "axes.facecolor": "black"}):
        pixels = imread(BytesIO(picture(render(tmp_path, metrics=make_metrics()))))
        assert matplotlib.rcParams["axes.facecolor"] == "black", "and the user's style is left alone"
    assert (pixels[[0, 0, -1, -1], [0, -1, 0, -1], :3] == 1).all()
    assert (pixels[..., :3] == 1).all(axis=-1).mean() > 0.8


def test_the_axes_begin_at_the_first_iteration(tmp_path, drawn, monkeypatch):
    from matplotlib.figure import Figure

    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *to, **how: (figures.append(figure), savefig(figure, *to, **how)))
    render(tmp_path, metrics=make_metrics())
    shown = [tick for axes in figures[0].axes for tick in axes.get_xticks() if axes.has_data() and tick >= axes.get_xlim()[0]]
    assert shown and min(shown) == 0


def test_a_page_is_light_or_dark_as_the_reader_s_system(tmp_path):
    assert "prefers-color-scheme: dark" in render(tmp_path)


def test_one_iteration_and_one_evaluation(tmp_path, drawn):
    picture(render(tmp_path, metrics=make_metrics(15)[-1:]))


@pytest.mark.slow
def test_the_same_input_gives_the_same_files(tmp_path, drawn):
    first = render(tmp_path / "a", metrics=make_metrics(), episodes=[make_episode()])

    assert render(tmp_path / "b", metrics=make_metrics(), episodes=[make_episode()]) == first


def test_what_isolated_the_dream_is_said(tmp_path):
    told = promises_of("guard")
    assert "stops Python code in this process, but not native code" in told
    assert told in Page(render(tmp_path, make_result(isolation=told))).text
    assert "Dreamed episodes run" not in Page(render(tmp_path, make_result())).text


def test_what_an_older_kernel_cannot_promise_is_in_the_sentence(monkeypatch):
    monkeypatch.setattr(kernel, "landlock_abi", lambda: 3)
    told = promises_of("process")
    assert "behind a wall of the kernel" in told and "to its hosts' ports, at any host" in told
    assert "before Linux 6.7, native code can connect" in told
