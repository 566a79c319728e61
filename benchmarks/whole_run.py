"""Time whole a9a_5 runs, as a user starts them: 30 rounds of 500 iterations, 5 clients, with the comparison."""

import json
import os
import statistics
import subprocess
import sys
import tempfile

REPEATS = 5
COMMAND = ("-m", "fedlightning.run", "--dataset", "a9a", "--clients", "paper_a9a_5.yaml", "--json", "-q")
CONFIG = """\
n_estimators_client: 100
num_rounds: 30
client_num: 5
num_iterations: 500
xgb: {max_depth: 8}
CNN: {lr: 0.0005}
"""


def main() -> None:
    """Print the median wall seconds, from the start of the process to its result."""
    seconds, rounds = [], set()
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            with open(f"{folder}/paper_a9a_5.yaml", "w", encoding="utf-8") as file:
                file.write(CONFIG)
            # Trees that an earlier run has left would be found.
            env = {**os.environ, "FEDLIGHTNING_CACHE_DIR": f"{folder}/cache"}
            done = subprocess.run(
                [sys.executable, *COMMAND], cwd=folder, env=env, check=True, capture_output=True, text=True
            )
        result = json.loads(done.stdout)
        seconds.append(result["seconds"])
        rounds.add(result["rounds"])
    print(
        f"rounds {sorted(rounds)}: median {statistics.median(seconds):.1f} s, {min(seconds):.1f} to {max(seconds):.1f}"
    )


if __name__ == "__main__":
    main()
