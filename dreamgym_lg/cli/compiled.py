"""The commands `dreamgym compile`, from traces to a world, and `dreamgym serve-world`."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dreamgym_lg.cli.agent import AGENT_HELP, Writes, is_replay_buffer
from dreamgym_lg.cli.console import console, errors_shown, say
from dreamgym_lg.hosted import EXAMPLE_MODEL, Hosted

Source = Annotated[
    Path, typer.Argument(metavar="TRACES", help="A replay buffer, or traces as `dreamgym import` reads them.", exists=True)
]
To = Annotated[Path, typer.Option(help="The folder of the world; one that is there is replaced.")]
Agent = Annotated[
    str | None, typer.Option(help=f"Its tools' schemas, and the marks of those that only read, count. {AGENT_HELP}")
]
Writer = Annotated[str, typer.Option(help=f"[b]enumerate[/b] finds rules without a model; {EXAMPLE_MODEL} repairs these.")]
Rounds = Annotated[int, typer.Option(min=1, help="Calls of a chat model, at most.")]
Prices = Annotated[tuple[float, float] | None, typer.Option(help="Of the chat model: input, output; per million tokens.")]
World = Annotated[Path, typer.Argument(metavar="FOLDER", help="A world that `dreamgym compile` wrote.")]
FirstTask = Annotated[
    str, typer.Option("--task", help="Recorded task in whose state each session begins. Default: all of them.")
]
Port = Annotated[int | None, typer.Option(help="Serve streamable HTTP at this port. Default: standard input and output.")]
OpenEnv = Annotated[bool, typer.Option("--openenv", help="Serve an OpenEnv environment over HTTP, by default at port 8000.")]
Host = Annotated[str, typer.Option(help="Address to serve HTTP at.")]


def compile_traces(
    traces: Source,
    to: To,
    agent: Agent = None,
    writes: Writes = None,
    writer: Writer = "enumerate",
    rounds: Rounds = 3,
    prices: Prices = None,
) -> None:
    """Compile recorded traces into code that answers your tools' calls.

    A tool is admitted where the code replays left-out traces exactly."""
    from dreamgym_lg.compiled.compile import compile_world
    from dreamgym_lg.experiment.agent_world import AgentWorld
    from dreamgym_lg.replay.buffer import ReplayBuffer
    from dreamgym_lg.traces import load_traces

    stored = is_replay_buffer(traces)
    with errors_shown(), ReplayBuffer(traces if stored else ":memory:") as buffer:
        if not stored:
            buffer.extend(load_traces(traces))
        agent_tools = AgentWorld(agent, context={}).index(buffer).tools if agent else ()  # no episode is played
        options: dict[str, Any] = {"writer": writer, "rounds": rounds, "hosted": Hosted(prices=prices), "say": say}
        tools = compile_world(buffer, to, tools=agent_tools, writes=writes, **options)
    columns = ("tool", "use", "exact", "refused", "not knowable", "wrong", "admitted")
    table = Table(*columns, title="replay of left-out traces", title_justify="left")
    for each in tools:
        figures = map(str, (each.exact, each.refused, each.unknowable, each.wrong))
        table.add_row(each.tool, "writes" if each.writes else "reads", *figures, each.admission)
    console.print(table)
    admitted = sum(each.admitted for each in tools)
    say(f"{admitted} of {len(tools)} tools are admitted. Read {to / 'world.py'} and {to / 'REPLAY.md'}.")


def serve_world(
    world: World, task: FirstTask = "", port: Port = None, host: Host = "127.0.0.1", openenv: OpenEnv = False
) -> None:
    """Serve a compiled world's tools by MCP or as an OpenEnv environment: a test double. Each client session begins anew."""
    with errors_shown():
        from dreamgym_lg.compiled.responder import Compiled

        if openenv:
            from dreamgym_lg.compiled.openenv_server import create_openenv_app

            app = create_openenv_app(Compiled(world), task=task)
        else:
            from dreamgym_lg.compiled.mcp_server import create_app, create_server, serve_stdio

            server = create_server(Compiled(world), task=task)
            if port is None:
                asyncio.run(serve_stdio(server))
                return
            app = create_app(server)
        import uvicorn

        uvicorn.run(app, host=host, port=port or 8000, log_level="warning")
