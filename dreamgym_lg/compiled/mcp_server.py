"""Serves a compiled world's tools by MCP, over standard input and output or HTTP.

It is a test double of the backend. Each client session starts from the first documents.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

from dreamgym_lg.compiled.responder import Compiled
from dreamgym_lg.compiled.runtime import Refusal
from dreamgym_lg.errors import MissingDependency

try:
    import mcp.types as types
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
except ImportError as error:
    raise MissingDependency.extra("mcp, which `dreamgym serve-world` serves with,", "mcp") from error


def create_server(world: Compiled, *, task: str = "") -> "Server[Any, Any]":
    """An MCP server of the world's admitted tools.

    Args: `task`, id of a recorded task, whose own first documents then come before those of others.
    """
    server: Server[Any, Any] = Server(world.folder.name)
    sessions: WeakKeyDictionary[Any, tuple[asyncio.Lock, list[list[Any]]]] = WeakKeyDictionary()

    @server.list_tools()
    async def list_tools() -> list[types.Tool]:
        return [
            types.Tool(name=each["name"], description=each.get("description", ""), inputSchema=each["parameters"])
            for each in world.schemas
        ]

    @server.call_tool(validate_input=True)
    async def call_tool(name: str, arguments: dict[str, Any]) -> list[types.TextContent]:
        lock, steps = sessions.setdefault(server.request_context.session, (asyncio.Lock(), []))
        async with lock:  # a client may send several calls at once: each changes the state for the next
            answer = await asyncio.to_thread(world.answer, task, steps, name, arguments)
            if answer is None:
                raise ValueError(f"the world does not know what {name} answers here: no recorded call is like it")
            steps.append([name, arguments, answer])
        if isinstance(answer, Refusal):
            raise ValueError(answer.text)  # the client gets an error with this text
        return [types.TextContent(type="text", text=answer)]

    return server


async def serve_stdio(server: "Server[Any, Any]") -> None:
    """Serve one client over standard input and output, until it disconnects."""
    async with stdio_server() as (reader, writer):
        await server.run(reader, writer, server.create_initialization_options())


def create_app(server: "Server[Any, Any]") -> Any:
    """A Starlette application that serves many clients at `/mcp` (streamable HTTP)."""
    from starlette.applications import Starlette
    from starlette.routing import Mount

    sessions = StreamableHTTPSessionManager(server)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with sessions.run():
            yield

    return Starlette(routes=[Mount("/mcp", app=sessions.handle_request)], lifespan=lifespan)
