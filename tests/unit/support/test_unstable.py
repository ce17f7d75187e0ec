"""Core. A test that fails once and then passes is listed; nothing else is forgiven."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.unstable import AGAIN_MAX, describe, judge, to_run_again

ROOT = Path(__file__).parents[3]
ONE, TWO = "tests/integration/test_a.py::test_one", "tests/unit/test_b.py::test_two"


@pytest.mark.parametrize(
    ("failed", "again"),
    [
        pytest.param([ONE, TWO], [ONE, TWO], id="some"),
        pytest.param(["tests/integration/test_a.py"], [], id="a file that cannot be imported"),
        pytest.param([f"{ONE}[{number}]" for number in range(AGAIN_MAX + 1)], [], id="too many"),
        pytest.param([], [], id="none"),
    ],
)
def test_second_runs_are_for_few_tests(failed, again):
    assert to_run_again(dict.fromkeys(failed, "")) == again


def test_what_fails_twice_is_red_and_what_passes_then_is_unstable():
    verdict = judge({ONE: "first", TWO: "other"}, [ONE, TWO], {TWO: "again"})
    assert (verdict.red, verdict.unstable) == ([TWO], [ONE])
    report = describe(verdict, {ONE: "first", TWO: "other"}, "1 passed")
    assert report.splitlines()[0] == f"unstable: {ONE}" and "first" in report and "1 passed" in report


def test_what_had_no_second_run_is_red():
    assert judge({ONE: ""}, [], {}).red == [ONE]


FLAKY = """
from pathlib import Path
def test_flaky():
    mark = Path(__file__).with_suffix(".ran")
    ran, _ = mark.exists(), mark.touch()
    assert ran, "the first time"
def test_broken():
    assert {broken}
"""


@pytest.mark.parametrize(("broken", "status"), [("True", 0), ("False", 1)])
def test_a_run_is_green_with_an_unstable_test_and_red_with_a_broken_one(tmp_path, broken, status):
    folder = tmp_path / "tests" / "integration"
    folder.mkdir(parents=True)
    (folder / "test_flaky.py").write_text(FLAKY.format(broken=broken))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "tests", "-q", "-p", "tests.support.failures", "-p", "no:cacheprovider"]
    environ = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTEST_ADDOPTS": "-p tests.support.failures"}
    (tmp_path / "tests" / "conftest.py").write_text("")
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert ended.returncode == status, ended.stdout + ended.stderr
    kept = (tmp_path / ".run" / "unstable.txt").read_text()
    assert "unstable: tests/integration/test_flaky.py::test_flaky" in kept and "the first time" in kept
    assert "test_broken" not in [line.partition("::")[2] for line in kept.splitlines() if line.startswith("unstable")]
