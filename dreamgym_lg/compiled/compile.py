"""Compiles recorded traces into a world. Its module answers calls, and is admitted where it replays them."""

import json
import math
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from langchain_core.language_models import BaseChatModel
from langchain_core.tools import BaseTool

from dreamgym_lg.compiled import runtime
from dreamgym_lg.compiled.chat_writer import ChatWriter
from dreamgym_lg.compiled.enumerate_rules import find_rules, find_unlearnable
from dreamgym_lg.compiled.recordings import Kind, Recordings, Trace
from dreamgym_lg.compiled.replaying import Replay, ToolReplay, replay_page
from dreamgym_lg.compiled.responder import Compiled
from dreamgym_lg.compiled.runtime import State, follow, load_module
from dreamgym_lg.compiled.source import write_rules, write_source
from dreamgym_lg.errors import ConfigurationError, ProcessLost
from dreamgym_lg.files import whole_folder
from dreamgym_lg.hosted import Hosted, name_of
from dreamgym_lg.progress import OnProgress, counter, show_progress
from dreamgym_lg.replay.buffer import ReplayBuffer

MIN_ANSWERED = 0.9
"""Share of a writing tool's calls about known entities that its rule has to answer. With less a chat model is asked."""
MANY_FOLDS = 10
"""Folds used when five would leave less than half of the traces to learn from."""


def compile_world(
    replay_buffer: ReplayBuffer,
    out: str | Path,
    *,
    writer: Literal["enumerate"] | BaseChatModel | str = "enumerate",
    tools: Sequence[BaseTool] = (),
    writes: Collection[str] | None = None,
    environment: str | None = None,
    rounds: int = 3,
    min_lower: float = 0.7,
    recompile: bool = True,
    hosted: Hosted | None = None,
    say: Callable[[str], None] = print,
    on_progress: OnProgress = show_progress,
) -> list[ToolReplay]:
    """Write a world that answers tool calls as the recorded backend does.

    The folder holds `world.py` (readable, yours to change), `world.db` (the first documents of each task), `rules.json` (the
    admitted tools) and `REPLAY.md` (the table that is returned).

    Args:
        out: The folder; an existing world there is replaced, unless `recompile` is False.
        writer: `enumerate` finds rules without a model. A chat model, or its name, repairs what these do not replay; its code
            runs behind the wall alone.
        tools, writes: As of `find_tool_uses`.
        environment: Name of the environment whose traces are compiled. Default: the buffer's only one.
        rounds: Most calls of a chat model.
        hosted: Prices and limits of a chat model. Its answers are kept beside the folder (`shop-answers.db`): after a
            kill the same call goes on, and pays for no answer twice.
        recompile: False to keep a world that the same library compiled from the same traces and tools, with your changes.
        say: Called with an estimate of a chat model's calls, tokens and price, and where a changed `world.py` is replaced, of
            which a copy stays beside the folder.
        min_lower: Least lower bound of the 95 % interval of a writing tool's share of exact answers to left-out traces.

    Raises `ConfigurationError` for a folder with other files, if no recorded tool is known to only read, and for a chat model
    on a machine without the wall.
    """
    out = Path(out).absolute()
    if out.exists() and not (out / "rules.json").exists() and any(out.iterdir()):
        raise ConfigurationError(f"{str(out)!r} holds other files than a compiled world's: give a new folder")
    recordings = Recordings.of(replay_buffer, tools=tools, writes=writes, environment=environment)
    made_of, earlier = _digest(recordings, writer, rounds, min_lower), _read_rules(out)
    if not recompile and earlier.get("made_of") == made_of:
        return [ToolReplay(**each) for each in earlier["replay"]]
    _keep_changed(out, earlier, say)
    if writer == "enumerate":
        text, replay = _enumerate(recordings, min_lower, on_progress)
    else:
        hosted = hosted or Hosted()
        hosted.keep_in(out.with_name(f"{out.name}-answers.db"))
        text, replay = _written(recordings, ChatWriter(writer, hosted), rounds, say, on_progress)
    report = replay.report(min_lower)
    with whole_folder(out) as folder:
        _write_folder(folder, text, recordings.without_refusals(replay.unlearned), report, made_of)
        (folder / "REPLAY.md").write_text(replay_page(report, min_lower))
    return report


def _enumerate(recordings: Recordings, min_lower: float, on_progress: OnProgress) -> tuple[str, Replay]:
    """A module of rules found without a model, and its replay."""
    left_out, looked_up = find_unlearnable(recordings.records, recordings.called_writes), set[str]()
    while True:
        replay = _replay_rules(recordings, on_progress, left_out, looked_up)
        # a tool with wrong answers gets a rule that answers only about entities that were looked up before
        wrong = {each.tool for each in replay.report(min_lower) if each.writes and each.wrong and not each.admitted}
        if not replay.unlearned <= left_out:  # first, as these may be why a rule is wrong
            left_out |= replay.unlearned
        elif not wrong <= looked_up:
            looked_up |= wrong
        else:
            text, replay.without_rule = _enumerated(recordings, left_out, looked_up)
            return text, replay


def _enumerated(recordings: Recordings, left_out: Collection[Kind], looked_up: Collection[str]) -> tuple[str, set[str]]:
    """A module of rules, and the writing tools for which none was found."""
    recordings = recordings.without_refusals(left_out)
    rules = find_rules(recordings.records, recordings.called_writes, looked_up=looked_up)
    return write_source(recordings, write_rules(rules)), {tool for tool, rule in rules.items() if rule is None}


def _replay_rules(
    recordings: Recordings, on_progress: OnProgress, left_out: Collection[Kind], looked_up: Collection[str]
) -> Replay:
    """Replay each trace on rules found without it. They run in this process, being code of ours alone.

    Args: `left_out`, kinds of refusals that are not learned; `looked_up`, as of `find_rules`.
    """
    folds = list(recordings.folds())
    if min(len(rest.traces) for rest, _ in folds) < len(recordings.traces) / 2:
        folds = list(recordings.folds(MANY_FOLDS))
    replay, advance = Replay(recordings), counter(on_progress, "compile: replay", len(folds))
    for rest, held_out in folds:
        source = load_module(_enumerated(rest, left_out, looked_up)[0], Path("world.py"))
        documents = {place: text for trace in rest.traces for place, text in rest.first_documents(trace).items()}
        for trace in held_out:
            state = State(documents)
            replay.add(trace, [follow(source, state, *call) for call in trace.calls])
        advance()
    return replay


def _written(
    recordings: Recordings, writer: ChatWriter, rounds: int, say: Callable[[str], None], on_progress: OnProgress
) -> tuple[str, Replay]:
    """The best module, enumerated or a chat model's, and its replay of held-out traces."""
    rest, held_out = next(recordings.folds())
    left_out = find_unlearnable(rest.records, rest.called_writes)
    best = text = _enumerated(rest, left_out, ())[0]
    learned = rest.without_refusals(left_out)
    failures, fewest = _failures(text, learned)
    say(writer.estimate(rest, rounds, text, failures) if failures else "the rules found without a model replay: none is asked")
    advance = counter(on_progress, "compile: write", rounds)
    for _ in range(rounds):
        if not failures:
            break
        text = write_source(rest, writer.write(rest, text, failures))
        failures, score = _failures(text, learned)
        if score < fewest:
            best, fewest = text, score
        advance()
    _replay_walled(best, rest, held_out, replay := Replay(recordings))
    return best, replay


def _failures(text: str, recordings: Recordings) -> tuple[list[str], tuple[float, int]]:
    """The calls of its own traces that a module fails, and its score. Less is better."""
    replayed = Replay(recordings)
    if problem := _replay_walled(text, recordings, recordings.traces, replayed):
        return [problem], (math.inf, 0)
    figures = replayed.kinds.values()
    wrong = [each.difference for each in figures if each.wrong]
    gaps = [each.gap for each in figures if each.writes and each.exact < MIN_ANSWERED * (each.exact + each.lacking)]
    return [*wrong, *gaps], (len(wrong), -sum(each.exact for each in figures))


def _replay_walled(text: str, recordings: Recordings, traces: Sequence[Trace], replay: Replay) -> str:
    """Replay traces on a module behind the wall. Returns the error that ended its process, else ""."""
    with tempfile.TemporaryDirectory(prefix="dreamgym-world-") as folder:
        _write_folder(Path(folder), text, recordings, ())
        world = Compiled(folder)
        try:
            for trace in traces:
                replay.add(trace, world.replay(trace))
        except ProcessLost as error:
            return str(error).replace(str(world.folder), "world")  # no random path: a repeated run sends the same prompt
        finally:
            world.close()
    return ""


def _digest(recordings: Recordings, writer: BaseChatModel | str, rounds: int, min_lower: float) -> str:
    """Digest of all that a world is compiled from, this library's code included."""
    code = [file.read_text() for file in sorted(Path(__file__).parents[1].rglob("*.py"))]
    recorded = [recordings.traces, sorted(recordings.writes), recordings.schemas]
    name = writer if isinstance(writer, str) else name_of(writer)
    return sha256(json.dumps([code, recorded, name, rounds, min_lower], default=str).encode()).hexdigest()


def _read_rules(folder: Path) -> dict[str, Any]:
    """The `rules.json` of a world there; empty without a whole one."""
    with suppress(OSError, ValueError):
        rules = json.loads((folder / "rules.json").read_text())
        if isinstance(rules, dict) and all((folder / name).is_file() for name in ("world.py", "world.db", "runtime.py")):
            return rules
    return {}


def _keep_changed(folder: Path, rules: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Copy a `world.py` that was changed by hand beside its folder, before another replaces it."""
    if "text" in rules and rules["text"] != sha256((folder / "world.py").read_bytes()).hexdigest():
        shutil.copyfile(folder / "world.py", copy := folder.with_name(f"{folder.name}-changed.py"))
        say(f"{folder / 'world.py'} was changed by hand and is written anew; your version is in {copy}")


def _write_folder(folder: Path, text: str, recordings: Recordings, report: Sequence[ToolReplay], made_of: str = "") -> None:
    (folder / "world.py").write_text(text)
    shutil.copyfile(runtime.__file__, folder / "runtime.py")
    with closing(sqlite3.connect(folder / "world.db")) as connection:
        connection.execute(
            "CREATE TABLE documents (id INTEGER PRIMARY KEY, task TEXT, tool TEXT, arguments TEXT, document TEXT)"
        )
        rows = [
            (trace.task, *place, stored)
            for trace in recordings.traces
            for place, stored in recordings.first_documents(trace).items()
        ]
        connection.executemany("INSERT INTO documents (task, tool, arguments, document) VALUES (?, ?, ?, ?)", rows)
        connection.commit()
    rules = {
        "made_of": made_of,
        "text": sha256(text.encode()).hexdigest(),
        "admitted": {each.tool: each.admitted for each in report},
        "replay": [asdict(each) for each in report],
        "tools": recordings.tools,
    }
    (folder / "rules.json").write_text(json.dumps(rules, indent=2) + "\n")
