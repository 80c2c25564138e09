"""Runs a training graph durably: to its end, on from where a crash left it, and to the end of a node at Ctrl-C."""

import signal
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.errors import GraphDrained
from langgraph.runtime import RunControl

from dreamgym_lg.errors import writing
from dreamgym_lg.graphs.training import Training, create_training_graph


def run_training(training: Training, checkpoints: Path, *, run: str, iterations: int) -> None:
    """Run a training, or go on with the one in the SQLite file `checkpoints`, whatever ended it.

    Ctrl-C lets the node at work finish and raises KeyboardInterrupt then; a second Ctrl-C stops at once. Either way the same
    call goes on from there.

    Args:
        iterations: Where to stop, in all; on going on it replaces the earlier number, be it more or less.
    """
    with SqliteSaver.from_conn_string(str(checkpoints)) as saver:
        graph = create_training_graph(training).compile(checkpointer=saver)
        config: RunnableConfig = {"configurable": {"thread_id": run}, "recursion_limit": 1_000_000}
        values: Any = {"run": run, "iterations": iterations}
        begun = graph.get_state(config)
        # a node that had ended, and whose checkpoint had not been written yet, is a task, and no next one
        node = begun.tasks[0].name if begun.tasks else None
        ended = node is not None and not begun.next
        updated = node in ("evaluate", "refresh") or (node == "count" and not ended) or (node == "update_policy" and ended)
        training.repeat_updates(run, begun.values.get("iteration", 0) + updated)
        if node is not None:
            if begun.next == ("update_policy",) and training.can_play_again(run, begun.values["iteration"]):
                graph.update_state(config, values, as_node="curriculum")  # so that the next node is `rollout`
            elif begun.values["iterations"] != iterations:
                graph.update_state(config, values)
            values = None
        elif iterations > begun.values.get("iterations", iterations):
            # who asks for more of a run that ended early gets it
            values |= {"uniform_iterations": 0, "gap": 0.0, "collapsed": False}
        control = RunControl()
        with _draining(control):
            try:
                graph.invoke(values, config, durability="sync", control=control)
            except sqlite3.OperationalError:  # of the checkpoints alone: a replay buffer's is none of SQLite's
                with writing(checkpoints, sqlite3.OperationalError):
                    raise
            except GraphDrained as drained:
                raise KeyboardInterrupt from drained


@contextmanager
def _draining(control: RunControl) -> Iterator[None]:
    """Ctrl-C asks the run to end between two nodes; signals reach the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def drain(*_: Any) -> None:
        control.request_drain("Ctrl-C")
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, drain)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
