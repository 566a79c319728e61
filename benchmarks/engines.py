"""Time the same a9a_5 run on every engine: until its first round is told, each round after it, and to its end.

A SuperLink with five nodes has to be there already (docs/engines.md); name its connection to include it.
"""

import argparse
import itertools
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPEATS = {"local": 3, "ray": 3, "superlink": 1}
CONFIG = """\
n_estimators_client: 100
num_rounds: 4
client_num: 5
num_iterations: 500
xgb: {max_depth: 8}
CNN: {lr: 0.0005}
"""
RUN = ("run", "--dataset", "a9a", "--clients", "paper_5_clients", "num_rounds=4", "n_estimators_client=100")
"""On a SuperLink the config is found by its name; it costs the same as CONFIG."""
ROUND = re.compile(r"^round (\d+)/\d+ ")


def time_command(words: list[str], folder: str) -> tuple[float, list[float], float]:
    """Return seconds until the first round's line, between the lines of the rounds after it, and to the end."""
    start = time.perf_counter()
    told = []
    with subprocess.Popen(
        [sys.executable, "-u", "-m", *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if ROUND.match(line):
                told.append(time.perf_counter() - start)
    if process.returncode:
        raise SystemExit("".join(lines))
    return told[0], [after - before for before, after in itertools.pairwise(told)], time.perf_counter() - start


def main() -> None:
    """Print a table, a row per engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--superlink", help="connection to a SuperLink with five nodes")
    arguments = parser.parse_args()
    local = ["fedlightning.run", "--dataset", "a9a", "--clients", "five_clients.yaml"]
    commands = {"local": [*local, "--engine", "local"], "ray": [*local, "--engine", "ray"]}
    if arguments.superlink:
        commands["superlink"] = ["fedlightning.submit", "--superlink", arguments.superlink, *RUN]
    print("| engine | first round told after, s | each further round, s | whole command, s |")
    print("| --- | ---: | ---: | ---: |")
    for engine, words in commands.items():
        firsts, rounds, wholes = [], [], []
        for _ in range(REPEATS[engine]):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "five_clients.yaml").write_text(CONFIG, encoding="utf-8")
                first, between, whole = time_command(words, folder)
            firsts.append(first)
            rounds += between
            wholes.append(whole)
        medians = [statistics.median(values) for values in (firsts, rounds, wholes)]
        print(f"| {engine} | {medians[0]:.1f} | {medians[1]:.2f} | {medians[2]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
