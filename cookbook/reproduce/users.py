"""Errors of a local user on tau-bench's held-out conversations, with another user's turn in its prompt and without.

Run: python cookbook/reproduce/users.py --data FOLDER [--out runs/users] [--steps 50] [--only with|without]

FOLDER holds tau_airline.json.xz, tau_airline_tasks.json.xz and tau_airline_conversations.json.xz. The model is fine-tuned on
the users of the training split's conversations and then asked, as the gate asks it, behind each of the agent's messages of
held-out ones. Stopped, the same command goes on. The tables are printed and written to OUT/*.md.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dreamgym_lg import Dream, Experiment
from dreamgym_lg.experiment import gate
from dreamgym_lg.fidelity.judgement import Judgement, ajudge
from dreamgym_lg.fidelity.users import EARLY, INVENTED, LATE, UNTOLD
from dreamgym_lg.integrations.tau.agent import TauWorld

WORDS = {
    INVENTED: "tells an id or amount that it cannot know",
    UNTOLD: "does not tell what the recorded customer told when asked",
    EARLY: "ends while the agent still had something to do",
    LATE: "does not end where the recorded customer did",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/users"))
    parser.add_argument("--steps", type=int, default=50, help="of 2 conversations")
    parser.add_argument("--conversations", type=int, default=24, help="held-out ones, those of the test split first")
    parser.add_argument("--only", choices=["with", "without"])
    given = parser.parse_args(arguments)
    for name, retrieved in (("with", 3), ("without", 0)):
        if given.only in (None, name):
            text = measure(given, given.out / name, retrieved)
            (given.out / f"{name}.md").write_text(text)
            print(f"{name} another user's turn\n\n{text}", flush=True)


def measure(given: argparse.Namespace, out: Path, retrieved: int) -> str:
    """The table of one user, trained first if it is not yet."""
    world = TauWorld("airline", given.data)
    settings = replace(world.settings, retrieved=retrieved, batch_size=2, user_steps=given.steps)
    experiment, begun = Experiment(world, out, settings, say=print), time.monotonic()
    experiment.collect()
    experiment.train_user()
    trained = time.monotonic()
    held_out = [each for split in ("test", "validation") for each in world.conversations if each.task.split == split]
    dream = Dream([], experiment.dream().user)
    judgement = asyncio.run(ajudge(dream, held_out[: given.conversations]))
    seconds = f"Training {trained - begun:.0f} s, measurement {time.monotonic() - trained:.0f} s."
    return (
        f"{table(judgement)}\n\nThe gate: {'; '.join(gate.refusals(judgement, 0.05, ['user'])) or 'accepted'}.\n\n{seconds}\n"
    )


def table(judgement: Judgement) -> str:
    """The rates of the user's errors in Markdown, with 95 % intervals."""
    (user,) = judgement.parts
    rates = [(words, user.errors[kind]) for kind, words in WORDS.items() if kind in user.errors]
    rows = [f"| {words} | {rate.successes} of {rate.episodes} | {rate} |" for words, rate in rates]
    return "\n".join(["| error | cases | rate |", "|---|---|---|", *rows])


if __name__ == "__main__":
    main()
