"""All that joins a desk to dreamgym-lg. Of the desk's own files, `write_logs.py` got the option `--world`."""

import importlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ValidationError

from dreamgym_lg import Dream, DreamGym, ReplayBuffer, Step, Task, Verify, load_traces
from dreamgym_lg.actions import ToolCall, parse_action
from dreamgym_lg.compiled import compile_world, compiled_dream
from dreamgym_lg.dream import TraceIndex
from dreamgym_lg.dream.facts import message_text
from dreamgym_lg.simulate.conversation import final_answer

HERE = Path(__file__).parent
WRITES = {"clinic": ["move_visit"], "parking": ["extend_permit"], "library": ["serve", "reserve", "hand_over"]}
SECOND_TRIES: dict[str, Any] = {
    **{"learner": "rft", "iterations": 1, "batch_size": 8, "policy_tokens": 96, "synthetic_share": 0.0},
    **{"evaluate_tasks": 60, "proof_tasks": 150},
}
"""Settings. Nothing is generated: a new request would have no case that says what is right."""
_database: ContextVar[str] = ContextVar("database")


class EpisodeDatabase:
    """The path of the episode's own database, which the desk's tools open at each call."""

    def __fspath__(self) -> str:
        return _database.get()


def _with_tools(bot: type[BaseChatModel]) -> BaseChatModel:
    """The rule bot as a chat model with tools, as the policy in its place will be: its own `bind_tools` drops them."""

    class Bot(bot):  # type: ignore[misc, valid-type]
        def bind_tools(self, tools: Sequence[Any], **options: Any) -> Any:
            return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **options)

    return Bot()


class Desk:
    """A desk's modules, its database as it is before any episode, and its tasks.

    Args: `name`, clinic, parking or library; a process opens one of them, because all have modules of the same names; `seed`,
    of another database with other tasks than the desk's own.
    """

    def __init__(self, name: str, out: Path, seed: int | None = None) -> None:
        sys.path.insert(0, str(HERE / name))
        self.agent, self.world, self.predecessor = map(importlib.import_module, ("agent", "world", "predecessor"))
        self.name, self.out, self.master = name, out, out / "master.db"
        self.seed = self.world.SEED if seed is None else seed
        out.mkdir(parents=True, exist_ok=True)
        if not self.master.exists():
            self.world.reset(self.master, self.seed)
        self.cases = {
            case["instruction"]: case for split in self.world.SIZES for case in self.world.make_tasks(split, self.seed)
        }
        self.graph = self.agent.build(_with_tools(self.predecessor.Predecessor), EpisodeDatabase())

    def tasks(self, *splits: str) -> list[Task]:
        return [
            Task(id=case["id"], instruction=case["instruction"], environment=self.name, split=split)
            for split in splits
            for case in self.world.make_tasks(split, self.seed)
        ]

    @contextmanager
    def fresh(self, task: Task, master: Path | None = None) -> Iterator[Path]:
        """The block works on a database of its own. Args: `master`, another one that it is a copy of."""
        with tempfile.TemporaryDirectory(prefix="desk-") as folder:
            path = self.world.episode_db(master or self.master, Path(folder) / "episode.db")
            token = _database.set(str(path))
            try:
                yield path
            finally:
                _database.reset(token)

    def check(self, task: Task, message: str) -> float:
        """The desk's own check of the database in use and the last message."""
        return self.world.check(self.cases[task.instruction], self.master, _database.get(), message)

    def check_steps(self, task: Task, steps: Sequence[Step], *, case: Any = None, master: Path | None = None) -> float | None:
        """The desk's own check of a dreamed episode: its writing calls are made on a private copy. None of an unknown task.

        Args: `case` and `master`, what is right and the database in another state than the desk's.
        """
        if (case := case or self.cases.get(task.instruction)) is None:
            return None
        writes = {tool.name: tool for tool in self.agent.make_tools(EpisodeDatabase()) if tool.name in WRITES[self.name]}
        with self.fresh(task, master):
            for step in steps:
                call = parse_action(step.action)
                if isinstance(call, ToolCall) and call.name in writes:
                    with suppress(ValidationError):
                        writes[call.name].invoke(dict(call.arguments))
            return self.world.check(case, master or self.master, _database.get(), message_text(steps[-1].action))

    @asynccontextmanager
    async def reset(self, task: Task) -> AsyncIterator[None]:
        with self.fresh(task):
            yield

    def create_gym(
        self, buffer: ReplayBuffer, dream: Dream | None = None, training: Sequence[Task] = (), **options: Any
    ) -> DreamGym:
        """The agent with its traces, its database and its check, ready to train. Args: `training`, tasks that no log has too."""
        return DreamGym(
            self.graph,
            replay_buffer=buffer,
            dream=dream,
            tasks=[*training, *self.tasks("validation", "test")],
            writes=WRITES[self.name],
            reset_real=self.reset,
            verify_real=lambda task, state: self.check(task, final_answer(state)),
            out=self.out,
            **options,
        )


def read_logs(desk: Desk, episodes: int, seed: int) -> ReplayBuffer:
    """The logs of the desk's predecessor, written unless they are there."""
    if not (logs := desk.out / "logs.jsonl").exists():
        arguments = ["--out", f"{logs}.part", "--episodes", str(episodes), "--seed", str(seed), "--world", str(desk.seed)]
        subprocess.run([sys.executable, "write_logs.py", *arguments], cwd=HERE / desk.name, check=True)
        Path(f"{logs}.part").rename(logs)
    buffer = ReplayBuffer(desk.out / "replay.db")
    buffer.extend(load_traces(logs, environment=desk.name))
    return buffer


def compile_dream(desk: Desk, buffer: ReplayBuffer) -> Dream:
    """Recorded answers, then code compiled from them; recorded successes judge, then the desk's own check."""
    tools, writes = desk.agent.make_tools(EpisodeDatabase()), WRITES[desk.name]
    if not (desk.out / "world").exists():
        compile_world(buffer, desk.out / "world", tools=tools, writes=writes)
    dream = compiled_dream(desk.out / "world", TraceIndex(buffer, tools=tools, writes=writes))
    return Dream(dream.responders, None, [*dream.judges, Verify(desk.check_steps)])
