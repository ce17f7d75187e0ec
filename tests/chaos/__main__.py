"""Shell. `python -m tests.chaos --minutes N --seed S`: faults at random for as long as you like.

Exit status 0: every promise was kept; 1: findings, printed, and the folder with logs and journals is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.chaos.nemesis import Nemesis
from tests.chaos.trial import attempt

ROUND_S = 120.0
"""A new cluster after so long: comparing whole logs at the end bounds how much one trial may write."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1, help="first seed; each trial has the next one")
    parser.add_argument("--faults", help="only these, separated by commas")
    arguments = parser.parse_args()
    only = arguments.faults.split(",") if arguments.faults else None
    ends_at, seed = time.monotonic() + arguments.minutes * 60, arguments.seed
    while True:
        round_ends = min(ends_at, time.monotonic() + ROUND_S)

        def strike(nemesis: Nemesis, stop: threading.Event, seed: int = seed, round_ends: float = round_ends) -> None:
            rng = random.Random(seed)
            while time.monotonic() < round_ends:
                nemesis.strike(rng.choice(only or list(nemesis.faults)))

        folder = Path(tempfile.mkdtemp(prefix="qmq-chaos-"))
        outcome = asyncio.run(attempt(folder, seed=seed, strike=strike, say=_say))
        print(f"seed {seed}: {outcome.summary()}", flush=True)
        for finding in outcome.findings:
            print(f"{finding.rule}: {finding.text}")
        if outcome.findings:
            print(f"logs and journals are kept in {folder}")
            return 1
        shutil.rmtree(folder)
        if time.monotonic() >= ends_at:
            return 0
        seed += 1


def _say(line: str) -> None:
    print(f"  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
