"""Shell. `python -m tests [pytest's arguments]`: the suite, and once more what failed.

Exit status: pytest's, except that a run in which only unstable tests failed ends with 0. Their outputs are appended to
`.run/unstable.txt`, which stays, and are printed at the end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.unstable import describe, judge, to_run_again

UNSTABLE = Path(".run/unstable.txt")
FAILED = 1
"""pytest's exit status if tests failed, and nothing else went wrong."""


def run(arguments: list[str], failures: Path) -> int:
    """Run pytest; what failed is in `failures` afterwards."""
    return subprocess.call([sys.executable, "-m", "pytest", f"--failures={failures}", *arguments])


def main(arguments: list[str]) -> int:
    """Run the suite with `arguments`; return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        first_path, second_path = Path(folder, "first.json"), Path(folder, "second.json")
        status = run(arguments, first_path)
        first = json.loads(first_path.read_text()) if first_path.exists() else {}
        again = to_run_again(first) if status == FAILED else []
        if not again:
            return status
        print(f"\nonce more, one after the other: {len(again)} tests", flush=True)
        command = [sys.executable, "-m", "pytest", f"--failures={second_path}", *again]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(ended.stdout, flush=True)
        if ended.returncode not in (0, FAILED) or not second_path.exists():
            return status
        verdict = judge(first, again, json.loads(second_path.read_text()))
    if verdict.unstable:
        report = describe(verdict, first, ended.stdout)
        UNSTABLE.parent.mkdir(exist_ok=True)
        with UNSTABLE.open("a") as file:
            file.write(report + "\n")
        print(f"{report}\n\n{len(verdict.unstable)} unstable, {len(verdict.red)} failed; kept in {UNSTABLE}")
    return FAILED if verdict.red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
