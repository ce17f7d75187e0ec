"""Core. Which failed tests are run once more, and what their second run says about them.

A test can fail because the machine stood still, or because of what an earlier test left open. It runs once more, by
itself. What passes then is *unstable*: a defect to be explained, which is listed and kept, and does not turn the whole
run red. A broken rule fails twice: cores, seeds and examples are the same in each run. A run in which many fail is red
as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

AGAIN_MAX = 8
"""With more failures than this something is broken; a second run would only hide it."""


@dataclass(frozen=True)
class Verdict:
    """`red` fails the run; `unstable` failed first and then passed."""

    red: list[str]
    unstable: list[str]


def to_run_again(failed: Mapping[str, str]) -> list[str]:
    """Return the failed tests that may have a second run; empty if the run is red whatever they would say.

    Args:
        failed: what failed in the whole run, with its output; a file that cannot be imported has no `::`.
    """
    if len(failed) > AGAIN_MAX or not all("::" in test for test in failed):
        return []
    return list(failed)


def judge(first: Mapping[str, str], again: list[str], second: Mapping[str, str]) -> Verdict:
    """Tell red tests from unstable ones.

    Args:
        first: failed tests of the whole run, with their output.
        again: those of them that ran once more.
        second: those of them that failed again, with their output.
    """
    red = [test for test in first if test not in again or test in second]
    return Verdict(red, [test for test in first if test not in red])


def describe(verdict: Verdict, first: Mapping[str, str], passed: str) -> str:
    """Return the report of the unstable tests: the output of the failed run of each, and that of the second run."""
    lines = [f"unstable: {test}" for test in verdict.unstable]
    outputs = [f"\n=== {test}, first run\n{first[test]}" for test in verdict.unstable]
    return "\n".join([*lines, *outputs, "\n=== second run, by itself", passed]) if lines else ""
