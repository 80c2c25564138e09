"""A compiled world as a responder of a dream, and as a judge."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, cast

from dreamgym_lg.actions import is_answer, parse_call, render_call
from dreamgym_lg.compiled import runtime
from dreamgym_lg.compiled.recordings import Trace, received
from dreamgym_lg.compiled.runtime import Refusal
from dreamgym_lg.dream.dream import Dream
from dreamgym_lg.dream.judges import ModelJudge
from dreamgym_lg.dream.model import Model
from dreamgym_lg.dream.parts import Answer, Episode, Responder, User, Verdict
from dreamgym_lg.dream.recorded import Recorded, References, message_fault
from dreamgym_lg.dream.schemas import Schemas
from dreamgym_lg.dream.trace_index import Success, TraceIndex
from dreamgym_lg.errors import ConfigurationError, ProcessLost
from dreamgym_lg.redaction import hidden_files
from dreamgym_lg.simulate.wall.wall import start_walled
from dreamgym_lg.types import Step, Task

PATIENCE = 10.0
"""Longest time for one answer in seconds, the start of the process included."""
_FILES = ("world.py", "world.db", "rules.json")
LONGEST_ANSWER = 2**20
"""Bytes of an answer."""


class Compiled:
    """Answers tool calls by a compiled world, which runs in a process behind the wall.

    The world's module may be written by a person or a model: it has no network, reads no replay buffer, writes no file, and is
    killed if an answer takes more than `PATIENCE` seconds.

    Args: `folder`, as `compile_world` writes it. Its schemas decide that 8 is 8.0 for a number, as in compilation.

    Raises `ConfigurationError` if the folder is no world, or this machine cannot build the wall; `ProcessLost` if the module
    ends its process, hangs or returns something else than a text.
    """

    name, version = "compiled", ""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        for name in _FILES:
            if not (self.folder / name).is_file():
                raise ConfigurationError(f"{str(folder)!r} holds no {name}: give a folder that `compile_world` wrote")
        self.digest = sha256(b"".join((self.folder / name).read_bytes() for name in _FILES)).hexdigest()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def respond(self, episode: Episode) -> Answer | None:
        if (call := parse_call(episode.action)) is None:
            return None
        own = episode.own_traces
        answer = self.answer(episode.task.id, steps_of(episode), call.name, call.arguments, own=own)
        return None if answer is None else to_answer(answer)

    def lookups(self, episode: Episode) -> list[Step]:
        """Current look-ups of the entities in the call, without those already in the episode."""
        if (call := parse_call(episode.action)) is None or not episode.own_traces:
            return []
        looks = self._ask("lookups", task=episode.task.id, steps=steps_of(episode), call=[call.name, dict(call.arguments)])
        try:
            steps = [Step(observation="", action=render_call(*look), next_observation=text) for *look, text in looks]
            if not all(isinstance(step.next_observation, str) for step in steps):
                raise TypeError("an answer is no text")
        except (TypeError, ValueError, AttributeError) as error:
            raise self._lost(f"returned something else than look-ups for {call.name}") from error
        seen = {step.action: step.next_observation for step in episode.steps}
        return [step for step in steps if seen.get(step.action) != step.next_observation]

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The admitted tools as functions in OpenAI's form."""
        rules = json.loads((self.folder / "rules.json").read_text())
        return [schema for name, schema in self._functions.items() if rules["admitted"].get(name)]

    @cached_property
    def _functions(self) -> dict[str, dict[str, Any]]:
        """The schemas of all tools, by name."""
        rules = json.loads((self.folder / "rules.json").read_text())
        return {schema["name"]: schema for schema in rules.get("tools", ())}

    def answer(
        self, task: str, steps: list[list[Any]], tool: str, arguments: Mapping[str, Any], *, own: bool = True
    ) -> str | Refusal | None:
        """The answer to a call after these steps; None if it is unknown.

        Args: `steps`, lists of tool, arguments and answer, for an error in a list; an answer of None is computed by the
            world. `own`, False to leave out the documents of the task's own traces.
        """
        reply = self._ask("respond", task=task, steps=steps, call=[tool, dict(arguments)], own=own)
        if (answer := _reply(reply)) is None and reply is not None:
            raise self._lost(f"answered {tool} with {type(reply).__name__} instead of a text")
        return answer

    def changes(self, task: str, steps: list[list[Any]], *, own: bool = True) -> dict[str, str | None]:
        """Reading call -> document, for all that these steps change; None if unknown. Args: `own`, as for `answer`."""
        changes = self._ask("changes", task=task, steps=steps, own=own)
        if not isinstance(changes, dict):
            raise self._lost(f"returned its changed documents as {type(changes).__name__} instead of an object")
        return changes

    def untracked_writes(self, task: str, steps: list[list[Any]], *, own: bool = True) -> list[str]:
        """The writing calls among these steps whose effect no document shows. Args: `own`, as for `answer`."""
        return list(map(str, self._ask("untracked_writes", task=task, steps=steps, own=own)))

    def close(self) -> None:
        """End the process; the next request starts a new one."""
        if self._process is not None:
            self._process = None
            self._end()

    def replay(self, trace: Trace) -> list[str | Refusal | None]:
        """The world's answer to each call of a trace, given after the recorded ones. Tools need not be admitted."""
        answers = self._ask("replay", steps=[[tool, dict(arguments), answer] for tool, arguments, answer in trace.calls])
        if not isinstance(answers, list) or len(answers) != len(trace.calls):
            raise self._lost("did not answer each call of a trace")
        return list(map(_reply, answers))

    def _ask(self, method: str, **arguments: Any) -> Any:
        """Call a method of `runtime.Module` in the process."""
        if "call" in arguments:
            arguments["call"] = self._received(*arguments["call"])
        arguments["steps"] = [self._received(*step) for step in arguments["steps"]]
        with self._lock:
            process = self._process or self._start()
            timer = threading.Timer(PATIENCE, _kill, [process])
            timer.start()
            try:
                requests, replies = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
                requests.write(json.dumps({"ask": method, **arguments}).encode() + b"\n")
                requests.flush()
                return json.loads(replies.readline(LONGEST_ANSWER))["result"]
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise self._lost(f"gave no answer to {arguments.get('call', method)}") from error
            finally:
                timer.cancel()

    def _received(self, tool: str, arguments: Mapping[str, Any], *answer: Any) -> list[Any]:
        """A call with the arguments that its tool receives."""
        return [tool, received(self._functions.get(tool), arguments), *answer]

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-I", runtime.__file__, str(self.folder)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        env = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        self._process = start_walled(
            command, scratch=None, hidden=hidden_files(), children=False, env=env, start_new_session=True, **pipes
        )
        self._end = weakref.finalize(self, _close, self._process)
        return self._process

    def _lost(self, what: str) -> ProcessLost:
        process, self._process = self._process, None
        self._end()
        status = f" (status {process.returncode})" if process is not None and process.returncode else ""
        return ProcessLost(f"the compiled world {str(self.folder)!r} {what}{status}; look at its world.py, or compile it again")


def steps_of(episode: Episode) -> list[list[Any]]:
    """[tool, arguments, answer] of the episode's calls, after the drawn look-ups of its task. An error is in a list."""
    calls = [(parse_call(step.action), step) for step in episode.steps]
    return _drawn(episode) + [
        [call.name, dict(call.arguments), step.next_observation if step.valid else [step.next_observation]]
        for call, step in calls
        if call is not None
    ]


def to_answer(reply: str | Refusal) -> Answer:
    """A world's reply as a responder's answer."""
    return Answer(reply.text, valid=False) if isinstance(reply, Refusal) else Answer(reply)


def _reply(value: Any) -> str | Refusal | None:
    """A reply of the process; None for something else than a text or a refusal."""
    match value:
        case str(text):
            return text
        case [str(text)]:
            return Refusal(text)
    return None


def _drawn(episode: Episode) -> list[list[Any]]:
    """The look-ups of a drawn task's entities, which count as calls before its first."""
    return [list(each) for each in episode.task.drawn.get("documents", ())]


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def _close(process: "subprocess.Popen[bytes]") -> None:
    _kill(process)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            cast(Any, pipe).close()


class EndState:
    """Judges by the changed documents: they must equal those after a recorded success.

    Both are computed in the same compiled world. The next judge decides if a document is unknown, if neither the episode nor
    the recorded success changed one, if writing calls differ whose effect no document shows (a message to a colleague), and
    if only free text does.
    """

    name, version = "compiled", ""

    def __init__(self, world: Compiled, references: References) -> None:
        self.world, self.references, self.digest = world, references, world.digest

    def decides(self, task: Task) -> bool:
        """Always False: the next judge may be needed for any task."""
        return False

    def judge(self, episode: Episode, answer: Answer | None) -> Verdict | None:
        if answer is not None or not is_answer(episode.action):
            return None
        if not (references := self.references.of_episode(episode)):
            return None
        own, steps = episode.own_traces, steps_of(episode)
        changes = self.world.changes(episode.task.id, steps, own=own)
        if None in changes.values():
            return None
        untracked = self.world.untracked_writes(episode.task.id, steps, own=own)
        alike, unclear = list[Success](), self.references.differ_in_free_text(episode, references)
        for success in references:
            calls = [[call.name, dict(call.arguments), None] for action in success.calls if (call := parse_call(action))]
            expected = self.world.changes(episode.task.id, _drawn(episode) + calls, own=own)
            if None in expected.values() or not (expected or changes):
                unclear = True
            elif expected == changes:
                is_same = untracked == self.world.untracked_writes(episode.task.id, _drawn(episode) + calls, own=own)
                alike, unclear = [*alike, *([success] if is_same else [])], unclear or not is_same
        if alike:
            fault = message_fault(episode, alike)
            reason = fault or "the world is as a recorded success leaves it"
            return Verdict(float(not fault), not fault, reason, final=not fault or bool(episode.task.drawn))
        if unclear:
            return None
        return Verdict(0.0, False, f"no recorded success leaves these changes: {json.dumps(changes, ensure_ascii=False)[:500]}")


def compiled_dream(folder: str | Path, index: TraceIndex, *, user: User | None = None, model: Model | None = None) -> Dream:
    """A dream of recorded answers, then the world's; recorded successes judge.

    Args: `folder`, of `compile_world`; `index`, of the traces, with the agent's tools; `model`, an experience model for what
    the world does not know: its prompt shows the documents of the entities in a call.
    """
    compiled, references = Compiled(folder), References(index, conversations=user is not None)
    responders: list[Responder] = [Schemas(index.tools), Recorded(index), compiled, *([] if model is None else [model])]
    last = [] if model is None else [ModelJudge(model, references=references)]
    return Dream(responders, user, [EndState(compiled, references), references, *last])
