"""Core. Which failed tests are run once more, and what their second run says about them.

A test of real processes can fail because the machine stood still. And what an earlier test left open is reported in
whichever test the garbage collector finds it. Both run once more, by themselves. What passes then is *unstable*: a
defect to be explained, which is listed and kept, and does not turn the whole run red. Other tests have no such excuse,
and neither has a run in which many fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PROCESS_FOLDERS = ("tests/integration/", "tests/chaos/", "tests/history/", "tests/outbox/")
"""Tests of real processes, sockets and databases."""

LEFTOVER = "PytestUnraisableExceptionWarning"
"""In the output of a test in which something was collected that nobody had closed."""

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
        failed: failed tests of the whole run, with their output.
    """
    if len(failed) > AGAIN_MAX or not all(map(_is_excused, failed, failed.values())):
        return []
    return list(failed)


def _is_excused(test: str, output: str) -> bool:
    return "::" in test and (test.startswith(PROCESS_FOLDERS) or LEFTOVER in output)


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
