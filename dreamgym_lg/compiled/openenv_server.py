"""Serves a compiled world as an OpenEnv environment.

Actions are OpenEnv's tool actions: `list_tools`, and `call_tool` with `tool_name` and `arguments`. A session is an episode.
"""

from typing import Any
from uuid import uuid4

from dreamgym_lg.compiled.responder import Compiled
from dreamgym_lg.errors import MissingDependency

try:
    from openenv.core import env_server as openenv
except ImportError as error:
    raise MissingDependency.extra("openenv-core, which `dreamgym serve-world --openenv` serves with,", "openenv") from error

SESSIONS = 64
"""Most concurrent sessions."""


class WorldEnvironment(openenv.Environment[openenv.Action, openenv.Observation, openenv.State]):
    """One episode of a compiled world. It gives no reward: only the client knows the task."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, world: Compiled, task: str) -> None:
        super().__init__()
        self._world, self._task, self._steps, self._id = world, task, list[list[Any]](), ""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> openenv.Observation:
        """Start an episode. If `episode_id` is a recorded task's id, its first documents come first."""
        self._steps, self._id = [], episode_id or str(uuid4())
        return self._tools()

    def step(self, action: openenv.Action, timeout_s: float | None = None, **_: Any) -> openenv.Observation:
        if not isinstance(action, openenv.CallToolAction):
            return self._tools()
        name, arguments = action.tool_name, action.arguments
        answer = self._world.answer(self._task or self._id, self._steps, name, arguments)
        if answer is not None:
            self._steps.append([name, arguments, answer])
        if isinstance(answer, str):
            return openenv.CallToolObservation(tool_name=name, result=answer)
        unknown = f"the world does not know what {name} answers here: no recorded call is like it"
        message = unknown if answer is None else answer.text
        error = openenv.ToolError(error_type=openenv.ToolErrorType.EXECUTION_ERROR, message=message)
        return openenv.CallToolObservation(tool_name=name, result=None, error=error)

    def _tools(self) -> openenv.ListToolsObservation:
        schemas = self._world.schemas
        tools = [
            openenv.Tool(name=f["name"], description=f.get("description", ""), input_schema=f["parameters"]) for f in schemas
        ]
        return openenv.ListToolsObservation(tools=tools)

    @property
    def state(self) -> openenv.State:
        return openenv.State(episode_id=self._id, step_count=len(self._steps))


def create_openenv_app(world: Compiled, *, task: str = "") -> Any:
    """A FastAPI application that speaks the OpenEnv protocol. Args: `task`, as in `mcp_server.create_server`."""
    # one process answers all sessions: the world keeps no state between calls
    return openenv.create_fastapi_app(
        lambda: WorldEnvironment(world, task), openenv.ListToolsAction, openenv.ListToolsObservation, SESSIONS
    )
