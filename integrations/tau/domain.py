"""A tau-bench domain: its database, its tools, its tasks and the official reward."""

import json
import lzma
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args

from langchain_core.tools import BaseTool, StructuredTool

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.tau import airline, retail
from dreamgym_lg.integrations.tau.common import Database, Tool
from dreamgym_lg.integrations.tau.key_order import in_field_order, in_official_order
from dreamgym_lg.traces import load_traces
from dreamgym_lg.types import Split, Task, Trajectory

DomainName = Literal["airline", "retail"]
_TOOLS: Mapping[str, Mapping[str, Tool]] = {
    name: {tool.__name__: tool for tool in tools} for name, tools in (("airline", airline.TOOLS), ("retail", retail.TOOLS))
}
for _name, _tool in (item for tools in _TOOLS.values() for item in tools.items()):
    _tool.__qualname__ = f"{_name.title().replace('_', '')}.invoke"  # as Python's errors name the official tool
HAND_OVER = "transfer_to_human_agents"
"""The tool that ends a conversation."""
OPENING = "Hi! I need some help, please."
"""The customer's first message, where none was recorded: what they want they say when asked."""
_SPLITS: Sequence[Split] = ["train", "train", "train", "train", "train", "train", "train", "validation", "test", "test"]
_FIX = "give the folder of tau_airline.json.xz, tau_airline_tasks.json.xz and the same of retail, or such a file"


class Domain:
    """Airline or retail: everything but who talks. Use `load_domain`.

    A database is plain dictionaries, and shares with all others of the domain the records that no tool has changed: change
    one by `call` and `tools` alone.
    """

    def __init__(self, name: DomainName, policy: str, schemas: Sequence[Mapping[str, Any]], database: Database) -> None:
        self.name = name
        self.policy = policy
        """The agent's system message."""
        self.schemas = schemas
        """Schemas of the tools, in OpenAI's form."""
        self._database, self._functions = database, _TOOLS[name]
        self._texts = {table: {id: _text(record) for id, record in records.items()} for table, records in database.items()}

    def create_database(self) -> Database:
        """A fresh database, in microseconds."""
        return {table: dict(records) for table, records in self._database.items()}

    def call(self, database: Database, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool. What it refuses or cannot do is answered as `Error: ...`; nothing is raised."""
        if name not in self._functions:
            return f"Unknown action {name}"
        try:
            answer = self._functions[name](database, **in_field_order(dict(arguments)))
        except Exception as error:
            return f"Error: {error}"
        return json.dumps(answer) if isinstance(answer, dict | list) else str(answer)

    def tools(self, database: Database | Callable[[], Database]) -> list[BaseTool]:
        """The tools of an agent, arguments unchecked, as in tau-bench.

        Args: `database`, or a function that returns the one to use, asked at each call.
        """
        current = database if callable(database) else lambda: database
        return [self._create_tool(schema["function"], current) for schema in self.schemas]

    def _create_tool(self, schema: Mapping[str, Any], database: Callable[[], Database]) -> BaseTool:
        name = schema["name"]

        def call(**arguments: Any) -> str:
            return self.call(database(), name, arguments)

        async def acall(**arguments: Any) -> str:  # on the loop: a call takes less time than a thread
            return call(**arguments)

        return StructuredTool(
            name=name,
            description=schema["description"],
            args_schema=dict(schema["parameters"]),
            func=call,
            coroutine=acall,
            return_direct=name == HAND_OVER,
        )

    def digest(self, database: Database) -> str:
        """16 hex digits of sha256 over the database as JSON with sorted keys."""
        tables = list[str]()
        for table in sorted(database):
            old, texts, new = self._database[table], self._texts[table], database[table]
            rows = (f'"{id}": {texts[id] if new[id] is old.get(id) else _text(new[id])}' for id in sorted(new))
            tables.append(f'"{table}": {{{", ".join(rows)}}}')
        return _digest(f"{{{', '.join(tables)}}}")

    def reward(self, task: Task, database: Database, messages: Sequence[str]) -> float:
        """The official reward: 1.0 for the right database and every output said, else 0.0.

        Args:
            task: One of `load_tasks`.
            database: After the conversation.
            messages: All that the agent said to the customer.
        """
        texts = [message.lower().replace(",", "") for message in messages]
        if not all(any(output.lower() in each for each in texts) for output in task.metadata["outputs"]):
            return 0.0
        right = self.create_database()
        for action in task.metadata["actions"]:
            self.call(right, action["name"], action["arguments"])
        return float(self.digest(database) == self.digest(right))


@lru_cache(maxsize=4)
def load_domain(name: DomainName, path: str | Path) -> Domain:
    """A domain of tau-bench, read once a process.

    Args: `path`, the packed file `tau_{name}.json.xz`, or its folder: `policy`, `tools` and `database` as xz-compressed JSON.

    Raises `ConfigurationError` for an unknown name and for other contents.
    """
    file = _file(name, path, "")
    content = _read(file)
    try:
        database = in_official_order(content["database"], _digest(_text(content["database"])))
        domain = Domain(name, content["policy"], content["tools"], database)
        missing = {schema["function"]["name"] for schema in domain.schemas} - _TOOLS[name].keys()
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{file} is no domain of tau-bench ({error!r}); {_FIX}") from error
    if missing:
        raise ConfigurationError(f"{file} has tools that {name} does not have: {', '.join(sorted(missing))}; {_FIX}")
    return domain


def load_tasks(name: DomainName, path: str | Path) -> list[Task]:
    """The tasks of a domain, each customer's in one split. About 70 % train, 10 % validation, 20 % test.

    `metadata` holds `user_scenario`, which the customer alone knows, `user_id`, the right calls (`actions`) and what has to be
    said (`outputs`).

    Args: `path`, the packed file `tau_{name}_tasks.json.xz`, or its folder.

    Raises `ConfigurationError` for an unknown name and for other contents.
    """
    file = _file(name, path, "_tasks")
    try:
        return [_task(name, stored) for stored in _read(file)]
    except (KeyError, TypeError) as error:
        raise ConfigurationError(f"{file} holds no tasks of tau-bench ({error!r}); {_FIX}") from error


def load_conversations(name: DomainName, path: str | Path) -> list[Trajectory]:
    """Recorded conversations, with the official reward. Each is a task of its own, with the metadata and split of `load_tasks`.

    Args: `path`, the folder of `tau_{name}_conversations.json.xz` and `tau_{name}_tasks.json.xz`.

    Raises `ConfigurationError` for an unknown name and for other contents.
    """
    file, tasks = _file(name, path, "_conversations"), {task.id: task for task in load_tasks(name, path)}
    conversations = list[Trajectory]()
    for row, recorded in zip(_read(file), load_traces(file, environment=f"tau-{name}"), strict=True):
        task = tasks[f"tau-{name}-{row['task']}"]
        id = f"{task.id}-{row['trial']}"
        own = replace(recorded.task, id=id, metadata=task.metadata, goal=task.goal, split=task.split)
        conversations.append(replace(recorded, task=own))
    return conversations


def _task(name: str, stored: Mapping[str, Any]) -> Task:
    kept = ("user_scenario", "user_id", "actions", "outputs")
    return Task(
        id=f"tau-{name}-{stored['task']}",
        instruction=OPENING,
        environment=f"tau-{name}",
        metadata={key: stored[key] for key in kept},
        goal={"goal": stored["user_scenario"]},
        split=_SPLITS[int(sha256(stored["user_id"].encode()).hexdigest(), 16) % len(_SPLITS)],
    )


def _file(name: str, path: str | Path, ending: str) -> Path:
    if name not in get_args(DomainName):
        raise ConfigurationError.unknown("domain", name, get_args(DomainName))
    where = Path(path).expanduser().resolve()
    return where / f"tau_{name}{ending}.json.xz" if where.is_dir() else where


def _read(file: Path) -> Any:
    try:
        with lzma.open(file) as packed:
            return json.load(packed)
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise ConfigurationError(f"{file} cannot be read ({error!r}); {_FIX}") from error


_text = partial(json.dumps, sort_keys=True, ensure_ascii=False)


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]
