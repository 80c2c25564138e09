"""The support desk: a language model learns from its traces, then in a dream of them, and is judged on the real database.

Run: python cookbook/support_desk/run.py                 (code compiled from the traces answers: no further model)
     python cookbook/support_desk/run.py --dreamed       (an experience model trained from the traces answers what they do not)
     python cookbook/support_desk/run.py --second-tries  (tickets that the traces lost are played in the dream; what the shop's
                                                          check accepts is imitated too: three hours)
     python cookbook/support_desk/run.py --truthful      (the tools' own code answers, on private copies: no dream can lie here)

With `--talking` customers leave things out, and the desk asks, reads back and waits for a yes (`customers.py`).

`agent.py`, `old_policy.py` and `tickets.py` are what a shop has anyway: its agent, how it worked so far, its staging database
with tickets and their check. `glue.py` joins them to dreamgym-lg, and `story.py` tells what happens. `--truthful` is a good
first step with any agent: what goes wrong then is not the dream's fault.
"""

import argparse
from pathlib import Path

MODEL = "smollm2-135m"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A support desk's policy, trained in a dream, judged on its real database")
    server = parser.add_mutually_exclusive_group()
    server.add_argument("--truthful", action="store_true", help="the tools' own code answers, on private copies")
    server.add_argument("--second-tries", action="store_true", help="imitate failed tickets that it solves in the dream, too")
    server.add_argument("--dreamed", action="store_true", help="an experience model trained from the traces answers")
    parser.add_argument("--talking", action="store_true", help="the desk that talks, with customers who leave things out")
    parser.add_argument("--seed", type=int, default=1, help="of the shop, its traces and all training")
    parser.add_argument("--traces", type=int, default=200, help="tickets that the old policy dealt with")
    parser.add_argument("--drawn", type=int, default=200, help="new tasks from the traces, for the compiled world; 0: none")
    parser.add_argument("--iterations", type=int, default=2, help="of training; may be raised later")
    parser.add_argument("--model", default=MODEL, help="weights that the policy begins with")
    parser.add_argument(
        "--all-baselines", action="store_true", help="also offline RL, imitation of drawn tasks: twice the time"
    )
    parser.add_argument("--out", type=Path, help="folder of everything; default: runs/desk-seedSEED")
    parser.add_argument("--quick", action="store_true", help="few steps of everything, to see it run; proves nothing")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.out = arguments.out or Path("runs") / f"desk-seed{arguments.seed}{'-quick' if arguments.quick else ''}"
    minutes = 3 if arguments.quick else 180 if arguments.second_tries else 15
    print(f"A support desk, seed {arguments.seed}, in {arguments.out}: about {minutes} minutes on two quiet cores.", flush=True)
    from story import tell  # not before the first line: it loads for some seconds

    tell(arguments)


if __name__ == "__main__":
    main()
