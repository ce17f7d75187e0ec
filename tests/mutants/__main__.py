"""`python -m tests.mutants`: plant small faults in the product, and list those that no check notices.

    python -m tests.mutants                             a sample of each area, 100 mutants large
    python -m tests.mutants qmq/replication --sample 0  all of a folder
    python -m tests.mutants --required                  only those that are planted in each run
    python -m tests.mutants --again                     what the last run did not catch
    python -m tests.mutants --resume                    the rest of a run that was stopped

It ends with a table: of each area how many were caught, and between which bounds the share of all its mutants lies.
Survivors must be in `tests/mutants/explained.txt`, with the reason why nobody can notice them; else the run fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.mutants.explained import EXPLAINED, REQUIRED, read_table
from tests.mutants.hunt import Catch, Hunter, hunt
from tests.mutants.operators import Mutant, mutants
from tests.mutants.reach import ROOT, Reach

AREAS = ("qmq/log", "qmq/replication", "broker")
APART = {"qmq/log/memory_disk.py", "qmq/log/overlay_disk.py"}
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
    parser.add_argument("--sample", type=int, default=100, help="so many of each area, drawn by --seed (0: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--seeds", type=int, default=500, help="of the simulator, for what the tests miss")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tests", nargs="+", default=TESTS, help="what may catch them (default: all that could)")
    parser.add_argument("--required", action="store_true", help="only what is planted in each run (required.txt)")
    parser.add_argument("--again", action="store_true", help="only what the run before, in --output, did not catch")
    parser.add_argument("--resume", action="store_true", help="only what the run before, in --output, did not come to")
    parser.add_argument("--output", type=Path, default=ROOT / ".run" / "mutants.json")
    options = parser.parse_args(arguments)
    groups = chosen(options)
    found = list({mutant.name: mutant for group in groups.values() for mutant in group}.values())
    before = (
        {name: by for name, by, _ in json.loads(options.output.read_text())}
        if options.resume and options.output.exists()
        else {}
    )
    catches = [Catch(mutant, before[mutant.name], 0) for mutant in found if mutant.name in before]

    def noted(catch: Catch) -> None:
        catches.append(catch)
        rows = [[c.mutant.name, c.by, round(c.took_s, 1)] for c in catches]
        options.output.write_text(json.dumps(rows, indent=0))  # each time: who stops it wants to know what it found

    options.output.parent.mkdir(exist_ok=True)
    left = [mutant for mutant in found if mutant.name not in before]
    always = paths_of(read_table(REQUIRED))  # whatever this run plants: what is learnt serves the next one
    modules = sorted({*product_files(AREAS), *always, *(mutant.path for mutant in found)})
    reach = Reach(options.output.with_name("mutants-reached.pickle"), tuple(modules))
    hunt(Hunter(left, options.seeds, options.jobs, reach, noted), options.tests)
    return report(catches, read_table(EXPLAINED), groups)


def chosen(options: argparse.Namespace) -> dict[str, list[Mutant]]:
    """Return what is planted, by area; a mutant that is required and drawn stands in both."""
    required = read_table(REQUIRED)
    always = [mutant for path in paths_of(required) for mutant in mutants(ROOT, path) if mutant.name in required]
    if options.required:
        return {"required": always}
    areas = {area: [one for path in product_files([area]) for one in mutants(ROOT, path)] for area in options.areas}
    if options.again:
        missed = {name for name, by, _ in json.loads(options.output.read_text()) if not by}
        return {area: [mutant for mutant in found if mutant.name in missed] for area, found in areas.items()}
    if options.sample:
        areas = {area: drawn(found, options.sample, options.seed) for area, found in areas.items()}
    return {"required": always, **areas} if options.areas == AREAS else areas


def drawn(area: list[Mutant], size: int, seed: int) -> list[Mutant]:
    """Return so many of an area, each as likely as another; what stands in the tables may be among them."""
    return random.Random(seed).sample(area, min(size, len(area)))


def paths_of(names: Iterable[str]) -> list[str]:
    return sorted({name.split(":", 1)[0] for name in names})


def product_files(areas: tuple[str, ...] | list[str]) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *areas], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split() if name.endswith(".py") and name not in APART]


def report(catches: list[Catch], explained: dict[str, str], groups: dict[str, list[Mutant]]) -> int:
    """Print a table by area, and what nobody caught; return 1 if something of that has no reason."""
    print(f"\n{'area':<24} {'mutants':>8} {'caught':>8} {'':>7} {'95 % between':>14} {'explained':>10} {'left':>5}")
    for area, group in groups.items():
        names = {mutant.name for mutant in group}
        inside = [catch for catch in catches if catch.mutant.name in names]
        survivors = [catch.mutant.name for catch in inside if not catch.by]
        caught = len(inside) - len(survivors)
        low, high = interval(caught, len(inside))
        reasons = sum(name in explained for name in survivors)
        shares = f"{caught / max(len(inside), 1):>7.1%} {f'{low:.1%}':>6} {f'{high:.1%}':>7}"
        print(f"{area:<24} {len(inside):>8} {caught:>8} {shares} {reasons:>10} {len(survivors) - reasons:>5}")
    left = [catch.mutant for catch in catches if not catch.by and catch.mutant.name not in explained]
    for mutant in sorted(left, key=lambda mutant: (mutant.path, mutant.line)):
        print(f"{mutant.path}:{mutant.line}  {mutant.name}")
    return bool(left)


def interval(caught: int, planted: int) -> tuple[float, float]:
    """Return between which shares the area's own lies with 95 % confidence (Wilson's interval)."""
    if not planted:
        return 0.0, 1.0
    z = 1.96
    share = caught / planted
    middle = share + z * z / (2 * planted)
    wide = z * math.sqrt(share * (1 - share) / planted + z * z / (4 * planted * planted))
    return (middle - wide) / (1 + z * z / planted), (middle + wide) / (1 + z * z / planted)


if __name__ == "__main__":
    sys.exit(main())
