"""What the report's tests share: results, metrics, episodes, and a page taken apart."""

import math
import random
import re
import struct
import zlib
from base64 import b64decode
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


from dreamgym_lg.report.proof import write_report
from dreamgym_lg.statistics import wilson
from dreamgym_lg.types import Step, Task, Trajectory


def measured(successes, episodes, invalid=0.05):
    interval = list(wilson(successes, episodes))
    outcomes = {str(task): task < successes for task in range(episodes)}
    return {
        "successes": successes,
        "episodes": episodes,
        "interval": interval,
        "invalid_action_share": invalid,
        "outcomes": outcomes,
    }


def make_result(**changes):
    return {
        "world": "peckingorder",
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
        "filtered": 0,
        "offline_rl": "",
        "real_steps": {"offline": 51234, "train": 0, "evaluation": 4012},
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
                "train_success": min(1.0, max(0.0, share + rng.gauss(0, 0.06))),
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
    html = write_report(make_result() if result is None else result, metrics, episodes, tmp_path / "out")
    assert html == tmp_path / "out/report.html" and [*html.parent.iterdir()] == [html]
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


def picture(source):
    """The page's picture, which is whole (every chunk's checksum holds) and of the promised size."""
    data = b64decode(re.search(r'base64,([^"]+)"', source)[1])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (2000, 500)
    place = 8
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        body = data[place + 4 : place + 8 + length]
        assert zlib.crc32(body) == struct.unpack(">I", data[place + 8 + length : place + 12 + length])[0]
        place += 12 + length
    assert body == b"IEND"
    return data
