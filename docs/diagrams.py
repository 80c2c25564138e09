"""Draws the pictures of the concept pages into docs/diagrams: `python docs/diagrams.py`. A test draws them again.

Boxes lie on a grid, arrows run between them. The picture of the method takes its nodes and edges from the compiled graph.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "diagrams"
WIDTH, HEIGHT, GAP_X, GAP_Y, EDGE = 204, 56, 56, 44, 12
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #222; text-anchor: middle }
.note { font-size: 12px; fill: #666 }
rect { fill: #f6f7f8; stroke: #888 }
rect.dream { stroke: #b84f00; stroke-width: 2 }
rect.real { stroke: #0072b2; stroke-width: 2 }
path { fill: none; stroke: #888; stroke-width: 1.5; marker-end: url(#tip) }
marker path { fill: #888; stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e8e8e8 } .note { fill: #a3a3a3 } rect { fill: #212325 }
  rect.dream { stroke: #f0914a } rect.real { stroke: #56b4e9 }
}
"""


class Box(NamedTuple):
    """A box at a column and row; `kind` is `dream`, `real` or empty."""

    column: float
    row: float
    title: str
    note: str = ""
    kind: str = ""

    @property
    def left(self) -> float:
        return EDGE + self.column * (WIDTH + GAP_X)

    @property
    def top(self) -> float:
        return EDGE + self.row * (HEIGHT + GAP_Y)


def draw(boxes: Mapping[str, Box], arrows: Sequence[tuple[str, str] | tuple[str, str, str]], *, what: str) -> str:
    """An SVG. Args: `boxes`, by name; `arrows`, from, to and maybe a label; `what` it shows, in words."""
    width = max(box.left for box in boxes.values()) + WIDTH + EDGE
    height = max(box.top for box in boxes.values()) + HEIGHT + EDGE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(what)}">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker></defs>',
    ]
    for arrow in arrows:
        parts += _arrow(boxes[arrow[0]], boxes[arrow[1]], arrow[2] if len(arrow) > 2 else "")
    for box in boxes.values():
        middle = box.left + WIDTH / 2
        parts.append(f'<rect class="{box.kind}" x="{box.left:g}" y="{box.top:g}" width="{WIDTH}" height="{HEIGHT}" rx="8"/>')
        parts.append(f'<text x="{middle:g}" y="{box.top + (24 if box.note else 33):g}">{escape(box.title)}</text>')
        if box.note:
            parts.append(f'<text class="note" x="{middle:g}" y="{box.top + 43:g}">{escape(box.note)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _arrow(start: Box, end: Box, label: str) -> list[str]:
    """A straight line between the nearest sides. Arrows back in a row run a little below the others."""
    x, y, to_x, to_y = (each for box in (start, end) for each in (box.left + WIDTH / 2, box.top + HEIGHT / 2))
    if start.row == end.row:
        right = end.column > start.column
        y = to_y = y + (0 if right else 12)
        x, to_x = (start.left + WIDTH, end.left - 2) if right else (start.left, end.left + WIDTH + 2)
        place = ((x + to_x) / 2, y - 6 if right else y + 16)
    elif start.column == end.column:
        down = end.row > start.row
        y, to_y = (start.top + HEIGHT, end.top - 2) if down else (start.top, end.top + HEIGHT + 2)
        place = (x + 10 + 4 * len(label), (y + to_y) / 2 + 4)
    else:
        down = end.row > start.row
        x, to_x = x + (30 if to_x > x else -30), to_x + (-30 if to_x > x else 30)
        y, to_y = (start.top + HEIGHT, end.top - 2) if down else (start.top, end.top + HEIGHT + 2)
        place = ((x + to_x) / 2 + 24, (y + to_y) / 2)
    text = f'<text class="note" x="{place[0]:g}" y="{place[1]:g}">{escape(label)}</text>'
    return [f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}"/>', *([text] if label else [])]


def method() -> str:
    """The training graph, as LangGraph compiles it: every node and edge is the graph's."""
    from dreamgym_lg.graphs.training import Training, create_training_graph

    parts: dict[str, Any] = dict.fromkeys((each.name for each in fields(Training) if each.default is MISSING), None)
    graph = create_training_graph(Training(**parts)).compile().get_graph()
    notes = {
        "__start__": "",
        "curriculum": "draws tasks",
        "rollout": "groups of episodes",
        "update_policy": "one optimiser step",
        "evaluate": "validation tasks",
        "count": "next iteration?",
        "__end__": "",
    }
    places = {"__start__": (0, 0), "curriculum": (1, 0), "rollout": (2, 0), "update_policy": (3, 0), "evaluate": (3, 1)}
    places |= {"count": (2, 1), "__end__": (0, 1)}
    boxes = {name: Box(*places[name], name.strip("_"), notes[name]) for name in graph.nodes}
    return draw(boxes, [(edge.source, edge.target) for edge in graph.edges], what="Nodes and edges of the training graph")


def grounding() -> str:
    boxes = {
        "call": Box(0, 0, "a tool call"),
        "recorded": Box(1, 0, "Recorded", "the same call in a trace", "real"),
        "similar": Box(0, 1, "similar real steps", "of other tasks", "real"),
        "model": Box(1, 1, "experience model", "reads the similar steps", "dream"),
        "answer": Box(2, 0, "the answer"),
        "end": Box(0, 2, "end of the episode"),
        "references": Box(1, 2, "References", "recorded successes", "real"),
        "judge": Box(2, 1, "ModelJudge", "what no trace decides", "dream"),
        "reward": Box(2, 2, "reward"),
    }
    arrows = [("call", "recorded"), ("recorded", "answer"), ("recorded", "model", "unknown"), ("similar", "model")]
    arrows += [
        ("model", "answer"),
        ("end", "references"),
        ("references", "reward"),
        ("references", "judge"),
        ("judge", "reward"),
    ]
    return draw(boxes, arrows, what="Traces answer and judge before a language model does")


def lies() -> str:
    boxes = {
        "cases": Box(0, 0, "recorded cases", "outcome known", "real"),
        "parts": Box(1, 0, "each part of the dream", "alone", "dream"),
        "gate": Box(2, 0, "the gate", "the worst part decides"),
        "train": Box(3, 0, "training"),
        "refused": Box(2, 1, "refused", "with figure and example"),
        "gap": Box(3, 1, "gap to reality", "where real episodes are allowed", "real"),
    }
    arrows = [("cases", "parts"), ("parts", "gate"), ("gate", "train"), ("gate", "refused"), ("train", "gap")]
    return draw(boxes, arrows, what="The gate measures every part of a dream before training")


def dream() -> str:
    boxes = {
        "task": Box(0, 0, "task"),
        "policy": Box(1, 0, "policy", "in your agent's graph"),
        "responders": Box(2, 0, "responders", "Schemas, Recorded, Model", "dream"),
        "user": Box(2, 1, "user", "where the agent talks", "dream"),
        "judges": Box(1, 1, "judges", "Verify, References, ModelJudge", "dream"),
        "reward": Box(0, 1, "reward and success"),
    }
    arrows = [("task", "policy"), ("policy", "responders", "call"), ("responders", "policy"), ("policy", "user")]
    arrows += [("policy", "judges", "end"), ("judges", "reward")]
    return draw(boxes, arrows, what="An episode: the policy acts, responders and user answer, judges reward")


def simulated_agents() -> str:
    boxes = {
        "graph": Box(0, 1, "your graph", "unmodified"),
        "model": Box(1, 0, "its chat models", "switched for one episode"),
        "tools": Box(1, 1, "its tools", "validated by LangChain"),
        "code": Box(1, 2, "its plain code"),
        "policy": Box(2, 0, "the policy", "that is trained"),
        "dream": Box(2, 1, "the dream", "traces, then a model", "dream"),
        "wall": Box(2, 2, "runs behind the wall", kind="real"),
    }
    arrows = [
        ("graph", "model"),
        ("graph", "tools"),
        ("graph", "code"),
        ("model", "policy"),
        ("tools", "dream"),
        ("code", "wall"),
    ]
    return draw(boxes, arrows, what="Chat models, tools and plain code of an agent in a dreamed episode")


def wall() -> str:
    boxes = {
        "models": Box(0, 0, "this process", "policy, experience model"),
        "worker": Box(1, 0, "worker process", "your agent's code", "dream"),
        "kernel": Box(2, 0, "Landlock, seccomp", "the kernel refuses"),
        "scratch": Box(1, 1, "scratch folder", "and what allow= names"),
        "world": Box(3, 0, "files, network", kind="real"),
    }
    arrows = [("models", "worker", "calls"), ("worker", "kernel"), ("worker", "scratch")]
    return draw(
        boxes, arrows, what="Nothing leads from the worker process to files and network but through the kernel, which refuses"
    )


def secrets() -> str:
    boxes = {
        "agent": Box(0, 0, "agent and traces", kind="real"),
        "episode": Box(1, 0, "episode", "keys replaced by [key]"),
        "buffer": Box(2, 0, "replay buffer", "traces, episodes, tokens"),
        "logs": Box(2, 1, "logs, terminal", "quotes in warnings"),
        "policy": Box(3, 0, "exported policy", "no key, no trace text"),
    }
    arrows = [("agent", "episode"), ("episode", "buffer"), ("episode", "logs"), ("buffer", "policy", "train")]
    return draw(boxes, arrows, what="Where texts of an agent and its traces go")


def task_curriculum() -> str:
    boxes = {
        "tasks": Box(0, 0, "recorded tasks", kind="real"),
        "draw": Box(1, 0, "tasks of an iteration"),
        "groups": Box(2, 0, "groups of episodes", kind="dream"),
        "variance": Box(2, 1, "rewards differ?", "hard but solvable"),
        "vary": Box(1, 1, "variations", "checked by the traces"),
    }
    arrows = [("tasks", "draw", ""), ("draw", "groups"), ("groups", "variance"), ("variance", "vary", "most"), ("vary", "draw")]
    return draw(boxes, arrows, what="Tasks whose rewards differed most are varied in the next iteration")


PICTURES: dict[str, Callable[[], str]] = {
    "method": method,
    "dream": dream,
    "grounding": grounding,
    "lies": lies,
    "secrets": secrets,
    "simulated-agents": simulated_agents,
    "task-curriculum": task_curriculum,
    "wall": wall,
}
"""By the name of the file in docs/diagrams."""

if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(picture(), encoding="utf-8")
