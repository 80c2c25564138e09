"""Memory and speed of TextWorld-Express's Java process: 100 slots of each game, by Java's options.

Run: python tests/benchmarks/bench_java.py [SLOTS]
"""

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random

import psutil
from py4j.java_gateway import GatewayParameters, JavaGateway, JavaObject, launch_gateway
from textworld_express.constants import BASEPATH, JAR_PATH

from dreamgym_lg.integrations.textworld_express.java import JAVA_OPTIONS, find_java
from dreamgym_lg.integrations.textworld_express.text import GAMES

OPTIONS = ([], JAVA_OPTIONS, ["-XX:+UseSerialGC", "-Xmx128m"], ["-XX:+UseSerialGC", "-Xmx64m"])
ROUNDS = 15
THREADS = 8


def play(slot: JavaObject, seed: int) -> int:
    """Real steps of one random episode."""
    rng, steps = Random(seed), 0
    state = json.loads(slot.generateNewGameJSON(seed, "train", False))
    while steps < 10 and not (state["tasksuccess"] or state["taskfailure"]):
        state = json.loads(slot.stepJSON(rng.choice(state["validActions"])))
        steps += 1
    return steps


def measure(game: str, slots: int, options: Sequence[str]) -> str:
    port, token, process = launch_gateway(
        classpath=JAR_PATH,
        cwd=BASEPATH,
        java_path=find_java(),
        javaopts=options,
        die_on_exit=True,
        enable_auth=True,
        return_proc=True,
    )
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port, auth_token=token), java_process=process)
    java, peak, steps = psutil.Process(process.pid), 0, 0
    made = [gateway.jvm.textworldexpress.runtime.PythonInterface() for _ in range(slots)]
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda slot: slot.load(game, GAMES[game]), made))
        start = time.perf_counter()
        for first in range(0, ROUNDS * slots, slots):
            steps += sum(threads.map(play, made, range(first, first + slots)))
            peak = max(peak, java.memory_info().rss)
        seconds = time.perf_counter() - start
    gateway.shutdown()
    return f"{game:13} {' '.join(options) or 'default':28} {peak / 2**20:5.0f} MiB  {steps / seconds:6.0f} steps/s"


def main() -> None:
    slots = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    for game in GAMES:
        for options in OPTIONS:
            print(measure(game, slots, options), flush=True)


if __name__ == "__main__":
    main()
