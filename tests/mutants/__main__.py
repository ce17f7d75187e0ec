"""`python -m tests.mutants`: plant small faults in the product, and list those that no check notices.

    python -m tests.mutants                             a sample of 300 of all that there are
    python -m tests.mutants qmq/replication --sample 0  all of a folder
    python -m tests.mutants --required                  only those that are planted in each run
    python -m tests.mutants --again                     what the last run did not catch

Survivors must be in `tests/mutants/explained.txt`, with the reason why nobody can notice them; else the run fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.mutants.explained import EXPLAINED, REQUIRED, read_table
from tests.mutants.hunt import ROOT, Catch, hunt
from tests.mutants.operators import Mutant, mutants

AREAS = ("qmq/log", "qmq/replication", "broker")
APART = {"qmq/log/memory_disk.py", "qmq/log/memory_system.py", "qmq/log/overlay_disk.py"}
"""Disks of simulators and of `qmq inspect`: no promise rests on them."""
TESTS = [
    "tests/unit/log",
    "tests/unit/replication",
    "tests/unit/broker",
    "tests/transcripts",
    "tests/property",
    "tests/golden",
    "tests/unit/server",
    "tests/unit/delayserver",
    "tests/unit/testing",
    "tests/unit/audit",
    "tests/unit/tools/test_inspect.py",
]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("areas", nargs="*", default=AREAS, help="files or folders (default: log, replication, broker)")
    parser.add_argument("--sample", type=int, default=300, help="so many of all, chosen by --choice (0: all)")
    parser.add_argument("--choice", type=int, default=1, help="which sample")
    parser.add_argument("--seeds", type=int, default=500, help="of the simulator, for what the tests miss")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tests", nargs="+", default=TESTS, help="what may catch them (default: all that could)")
    parser.add_argument("--required", action="store_true", help="only what is planted in each run (required.txt)")
    parser.add_argument("--again", action="store_true", help="only what the run before, in --output, did not catch")
    parser.add_argument("--output", type=Path, default=ROOT / ".run" / "mutants.json")
    options = parser.parse_args(arguments)
    found = chosen(options)
    catches: list[Catch] = []

    def noted(catch: Catch) -> None:
        catches.append(catch)
        rows = [[c.mutant.name, c.mutant.line, c.by, round(c.took_s, 1)] for c in catches]
        options.output.write_text(json.dumps(rows, indent=0))  # each time: who stops it wants to know what it found

    options.output.parent.mkdir(exist_ok=True)
    hunt(found, options.tests, seeds=options.seeds, jobs=options.jobs, noted=noted)
    return report([c.mutant for c in catches if not c.by], len(catches))


def chosen(options: argparse.Namespace) -> list[Mutant]:
    found = [mutant for path in product_files(options.areas) for mutant in mutants(ROOT, path)]
    if options.again:
        missed = {name for name, _, by, _ in json.loads(options.output.read_text()) if not by}
        return [mutant for mutant in found if mutant.name in missed]
    required = read_table(REQUIRED)
    always = [mutant for path in paths_of(required) for mutant in mutants(ROOT, path) if mutant.name in required]
    if options.required:
        return always
    others = [mutant for mutant in found if mutant.name not in required]
    if options.sample:
        others = random.Random(options.choice).sample(others, min(options.sample, len(others)))
    elif options.areas != AREAS:
        always = [mutant for mutant in found if mutant.name in required]
    return always + others


def paths_of(names: Iterable[str]) -> list[str]:
    return sorted({name.split(":", 1)[0] for name in names})


def product_files(areas: tuple[str, ...] | list[str]) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *areas], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split() if name.endswith(".py") and name not in APART]


def report(survivors: list[Mutant], planted: int) -> int:
    explained = read_table(EXPLAINED)
    unexplained = [mutant for mutant in survivors if mutant.name not in explained]
    caught = planted - len(survivors)
    print(
        f"\n{planted} mutants: {caught} caught ({caught / max(planted, 1):.1%}), "
        f"{len(survivors) - len(unexplained)} survive and are explained, {len(unexplained)} survive unexplained"
    )
    for mutant in sorted(unexplained, key=lambda mutant: (mutant.path, mutant.line)):
        print(f"{mutant.path}:{mutant.line}  {mutant.name}")
    return bool(unexplained)


if __name__ == "__main__":
    sys.exit(main())
