"""A compiled world as responder and judge of a dream. It judges by the end state."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from dreamgym_lg.actions import is_answer, parse_call, render_call
from dreamgym_lg.compiled import runtime
from dreamgym_lg.compiled.recordings import Trace
from dreamgym_lg.dream.dream import Dream
from dreamgym_lg.dream.judges import ModelJudge
from dreamgym_lg.dream.model import Model
from dreamgym_lg.dream.parts import Answer, Episode, Responder, User, Verdict
from dreamgym_lg.dream.recorded import Recorded, References, message_fault
from dreamgym_lg.dream.schemas import Schemas
from dreamgym_lg.dream.trace_index import TraceIndex
from dreamgym_lg.errors import ConfigurationError, ProcessLost
from dreamgym_lg.redaction import hidden_files
from dreamgym_lg.simulate.wall.wall import start_walled
from dreamgym_lg.types import Step, Task

PATIENCE = 10.0
"""Seconds that a world may take for one answer, its start included."""
_FILES = ("world.py", "world.db", "rules.json")
LONGEST_ANSWER = 2**20
"""Bytes of an answer."""


class Compiled:
    """Answers the calls that a compiled world knows, in a process behind the wall.

    The world's module is code that a person or a model may have written: it sees no network and no replay buffer, writes no
    file and is killed when it takes more than `PATIENCE` seconds.

    Args: `folder`, as `compile_world` writes it.

    Raises `ConfigurationError` where the folder is none, or this machine cannot build the wall; `ProcessLost` where the module
    ends its process, hangs or answers with something else than a text.
    """

    name, version = "compiled", ""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        for name in _FILES:
            if not (self.folder / name).is_file():
                raise ConfigurationError(f"{str(folder)!r} holds no {name}: give a folder that `compile_world` wrote")
        self.digest = sha256(b"".join((self.folder / name).read_bytes() for name in _FILES)).hexdigest()
        self._process: subprocess.Popen[bytes] | None = None
        self._asking = threading.Lock()

    def respond(self, episode: Episode) -> Answer | None:
        if (call := parse_call(episode.action)) is None:
            return None
        answer = self.answer(episode.task.id, steps_of(episode), call.name, call.arguments)
        return None if answer is None else Answer(answer)

    def lookups(self, episode: Episode) -> list[Step]:
        """The look-ups of what the call names, as the world would answer them now. Without those just told."""
        if (call := parse_call(episode.action)) is None or not episode.own_traces:
            return []
        looks = self._ask("lookups", task=episode.task.id, steps=steps_of(episode), call=[call.name, dict(call.arguments)])
        try:
            steps = [Step(observation="", action=render_call(*look), next_observation=text) for *look, text in looks]
            texts = all(isinstance(step.next_observation, str) for step in steps)
        except (TypeError, ValueError, AttributeError):
            texts = False
        if not texts:
            raise self._lost(f"named what it knows for {call.name} by something else than look-ups")
        told = {step.action: step.next_observation for step in episode.steps}
        return [step for step in steps if told.get(step.action) != step.next_observation]

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The admitted tools as functions in OpenAI's form."""
        rules = json.loads((self.folder / "rules.json").read_text())
        return [schema for schema in rules["tools"] if rules["admitted"].get(schema["name"])]

    def answer(self, task: str, steps: list[list[Any]], tool: str, arguments: Mapping[str, Any]) -> str | None:
        """The answer to a call behind these steps. None where the world does not know it.

        Args: `steps`, of tool, arguments and answer; an answer of None stands for the world's own.
        """
        answer = self._ask("respond", task=task, steps=steps, call=[tool, dict(arguments)])
        if answer is not None and not isinstance(answer, str):
            raise self._lost(f"answered {tool} with {type(answer).__name__} instead of a text")
        return answer

    def changes(self, task: str, steps: list[list[Any]]) -> dict[str, str | None]:
        """The documents that calls (tool, arguments, answer or None) change; None for unknown ones."""
        changes = self._ask("changes", task=task, steps=steps)
        if not isinstance(changes, dict):
            raise self._lost(f"named its changed documents by {type(changes).__name__} instead of an object")
        return changes

    def close(self) -> None:
        """End the process; the next question starts another."""
        if self._process is not None:
            self._end()

    def replay(self, trace: Trace) -> list[str | None]:
        """The world's own answer to each call of a trace, behind the recorded ones. Admitted tools or not."""
        answers = self._ask("replay", steps=[[tool, dict(arguments), answer] for tool, arguments, answer in trace.calls])
        if not isinstance(answers, list) or len(answers) != len(trace.calls):
            raise self._lost("did not answer each call of a trace")
        return [answer if isinstance(answer, str) else None for answer in answers]

    def _ask(self, question: str, **arguments: Any) -> Any:
        with self._asking:
            process = self._process or self._start()
            timer = threading.Timer(PATIENCE, _kill, [process])
            timer.start()
            try:
                cast(Any, process.stdin).write(json.dumps({"ask": question, **arguments}).encode() + b"\n")
                cast(Any, process.stdin).flush()
                line = cast(Any, process.stdout).readline(LONGEST_ANSWER)
                return json.loads(line)["result"]
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise self._lost(f"gave no answer to {arguments.get('call', question)}") from error
            finally:
                timer.cancel()

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
    calls = [(parse_call(step.action), step) for step in episode.steps if step.valid]
    return _drawn(episode) + [
        [call.name, dict(call.arguments), step.next_observation] for call, step in calls if call is not None
    ]


def _drawn(episode: Episode) -> list[list[Any]]:
    """The look-ups of the task's drawn entities, as calls before its first."""
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
    """Judges by the documents that an episode leaves.

    They must be those that a recorded success's calls leave.

    Both are computed in the same compiled world. It judges nothing where a document is unknown, and leaves episodes in which
    neither changed anything to the next judge: there the message decides.

    Args: `world`, `references`.
    """

    name, version = "compiled", ""

    def __init__(self, world: Compiled, references: References) -> None:
        self.world, self.references, self.digest = world, references, world.digest

    def decides(self, task: Task) -> bool:
        """False of every task: what is unknown or unchanged is the next judge's."""
        return False

    def judge(self, episode: Episode, answer: Answer | None) -> Verdict | None:
        if answer is not None or not is_answer(episode.action):
            return None
        references = self.references.of_episode(episode)
        left = self.world.changes(episode.task.id, steps_of(episode)) if references else {"": None}
        if None in left.values():
            return None
        for success in references:
            calls = [[call.name, dict(call.arguments), None] for action in success.calls if (call := parse_call(action))]
            right = self.world.changes(episode.task.id, _drawn(episode) + calls)
            if None in right.values() or not (right or left):
                return None
            if right == left:
                fault = message_fault(episode, [success])
                return Verdict(float(not fault), not fault, fault or "the world is as a recorded success leaves it")
        return Verdict(0.0, False, f"no recorded success leaves these changes: {json.dumps(left, ensure_ascii=False)[:500]}")


def compiled_dream(folder: str | Path, index: TraceIndex, *, user: User | None = None, model: Model | None = None) -> Dream:
    """A dream of recorded answers, then the world's; recorded successes judge.

    Args: `folder`, of `compile_world`; `index`, of the traces, with the agent's tools; `model`, an experience model that
        answers and judges the rest, told the state of the entities in a call.
    """
    compiled, references = Compiled(folder), References(index, conversations=user is not None)
    responders: list[Responder] = [Schemas(index.tools), Recorded(index), compiled, *([] if model is None else [model])]
    last = [] if model is None else [ModelJudge(model, references=references)]
    return Dream(responders, user, [EndState(compiled, references), references, *last])
