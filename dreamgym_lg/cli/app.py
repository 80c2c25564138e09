"""The `dreamgym` command line: the list of its commands."""

import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

import typer

from dreamgym_lg.cli.agent import doctor, import_traces
from dreamgym_lg.cli.canary import canary
from dreamgym_lg.cli.compare import compare
from dreamgym_lg.cli.compiled import compile_traces, serve_world
from dreamgym_lg.cli.console import quiet_libraries
from dreamgym_lg.cli.experiment import collect, demo, evaluate, export, train
from dreamgym_lg.cli.fidelity import fidelity
from dreamgym_lg.cli.first_look import init, try_agent
from dreamgym_lg.cli.play import play
from dreamgym_lg.cli.servers import serve, ui
from dreamgym_lg.hosted import EXAMPLE_MODEL

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train a LangGraph agent's policy in a dream, and prove the gain in the real environment.",
)

Version = Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)]


@app.callback(invoke_without_command=True)
def root(show_version: Version = False) -> None:
    quiet_libraries(offline=False)
    if show_version:
        print(version("dreamgym-lg"))
        raise typer.Exit


COMMANDS: tuple[tuple[str, Callable[..., None], tuple[str, ...]], ...] = (
    ("demo", demo, ("demo", "demo --iterations 40", "demo twc --seed 2")),
    ("collect", collect, ("collect alfworld --out runs/alfworld", "collect my_app.py:world")),
    ("train", train, ("train peckingorder --iterations 30", "train my_app.py:experiment --lora --servers http://gpu1:8000")),
    ("eval", evaluate, ("eval peckingorder --seed 1", "eval runs/peckingorder-seed1")),
    ("export", export, ("export runs/peckingorder-seed1 policies/mine",)),
    ("serve", serve, ("serve policies/mine", "serve policies/mine --port 8100 --device cpu")),
    ("canary", canary, ("canary canary.db", "canary canary.db --stop")),
    ("doctor", doctor, ("doctor my_app.py:graph", "doctor my_app.agents:create_agent --json")),
    ("try", try_agent, ("try my_app.py:graph traces.jsonl --writes refund",)),
    ("init", init, ("init my_app.py:graph traces.jsonl --writes refund",)),
    ("import", import_traces, ("import traces.jsonl --to replay.db",)),
    ("compare", compare, ("compare my_app.py:graph my_app.py:new_graph --replay-buffer replay.db --world worlds/shop",)),
    (
        "compile",
        compile_traces,
        (
            "compile traces.jsonl --to worlds/shop --writes refund --writes cancel",
            "compile traces.jsonl --agent my_app.py:graph --to worlds/shop",
        ),
    ),
    (
        "serve-world",
        serve_world,
        ("serve-world worlds/shop", "serve-world worlds/shop --port 8200", "serve-world worlds/shop --openenv"),
    ),
    ("fidelity", fidelity, ("fidelity train.py:gym", f"fidelity --replay-buffer replay.db --experience-model {EXAMPLE_MODEL}")),
    ("play", play, ("play runs/peckingorder-seed1", f"play my_app.py:graph --policy {EXAMPLE_MODEL}")),
    ("ui", ui, ("ui runs/peckingorder-seed1", "ui replay.db --port 9000")),
)
"""Name, function and examples of each command."""

for name, command, examples in COMMANDS:
    app.command(name, epilog="Examples: " + "; ".join(f"[b]dreamgym {example}[/b]" for example in examples))(command)

if __name__ == "__main__":
    sys.exit(app())
