"""The `dreamgym` command line: its commands, each from its own file."""

import sys

import typer

from dreamgym_lg.cli.agent import doctor, import_traces
from dreamgym_lg.cli.canary import canary
from dreamgym_lg.cli.experiment import collect, demo, evaluate, export, report, train
from dreamgym_lg.cli.fidelity import fidelity
from dreamgym_lg.cli.play import play
from dreamgym_lg.cli.serve import serve
from dreamgym_lg.cli.ui import ui
from dreamgym_lg.hosted.chat_model import EXAMPLE_MODEL

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train a LangGraph agent's policy in a dream, and prove the gain in the real environment.",
)


def _examples(*commands: str) -> str:
    return "Examples: " + "; ".join(f"[b]dreamgym {command}[/b]" for command in commands)


app.command(epilog=_examples("demo", "demo --iterations 40", "demo twc --seed 2", "demo --quick"))(demo)
app.command(epilog=_examples("collect alfworld --out runs/alfworld", "collect my_app.py:world"))(collect)
app.command(
    epilog=_examples(
        "train peckingorder --iterations 30",
        "train my_app.py:experiment",
        "train my_app.py:experiment --lora --servers http://gpu1:8000 --servers http://gpu2:8000",
    )
)(train)
app.command("eval", epilog=_examples("eval peckingorder --seed 1", "eval runs/peckingorder-seed1"))(evaluate)
app.command(epilog=_examples("report runs/peckingorder-seed1", "report my_app.py:experiment"))(report)
app.command(epilog=_examples("export runs/peckingorder-seed1 policies/mine"))(export)
app.command(epilog=_examples("serve policies/mine", "serve policies/mine --port 8100 --device cpu"))(serve)
app.command(epilog=_examples("canary canary.db", "canary canary.db --html canary.html"))(canary)
app.command(epilog=_examples("doctor my_app.py:graph", "doctor my_app.agents:create_agent --json"))(doctor)
app.command("import", epilog=_examples("import traces.jsonl --to replay.db"))(import_traces)
app.command(
    epilog=_examples(
        "fidelity runs/peckingorder-seed1",
        f"fidelity --replay-buffer replay.db --experience-model {EXAMPLE_MODEL}",
    )
)(fidelity)
app.command(
    epilog=_examples(
        "play runs/peckingorder-seed1",
        "play runs/peckingorder-seed1 --real",
        f"play --replay-buffer replay.db --experience-model {EXAMPLE_MODEL}",
        "play my_app.py:graph",
        f"play my_app.py:graph --policy {EXAMPLE_MODEL} --replay-buffer replay.db --record",
    )
)(play)
app.command(epilog=_examples("ui runs/peckingorder-seed1", "ui replay.db --port 9000"))(ui)

if __name__ == "__main__":
    sys.exit(app())
