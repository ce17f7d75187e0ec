"""Shell. `python -m tests.history --messages N --seed S`: real processes and faults, and a judge of what all saw.

Exit status 0: every promise was kept; 1: findings, printed, and the folder with logs and journals is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.history.trial import attempt, judge


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.history")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=2_500.0, help="messages a second that all producers send")
    parser.add_argument("--keys", type=int, default=10_000, help="order keys that half of the messages share")
    parser.add_argument("--copies", type=int, default=2, help="more than two: roles change by swaps and failovers only")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--judge", type=Path, help="send nothing; judge what an earlier run left in this folder")
    arguments = parser.parse_args()
    folder, began = arguments.judge or Path(tempfile.mkdtemp(prefix="qmq-history-")), time.monotonic()
    if arguments.judge:
        outcome = judge(folder)
    else:
        outcome = asyncio.run(
            attempt(
                folder,
                messages=arguments.messages,
                rate=arguments.rate,
                keys=arguments.keys,
                seed=arguments.seed,
                copies=arguments.copies,
                say=lambda line: print(f"  {line}", flush=True),
            )
        )
    print(f"seed {arguments.seed}: {outcome.summary()}, {time.monotonic() - began:.0f} s", flush=True)
    for finding in outcome.findings:
        print(f"{finding.kind}: {finding.text}")
    if outcome.findings:
        print(f"logs and journals are kept in {folder}")
        return 1
    if not arguments.judge:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
