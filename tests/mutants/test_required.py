"""Shell. A test file catches each fault of `required.txt`, every one in a process of its own."""

from __future__ import annotations

import ast
import multiprocessing

import pytest

from tests.mutants.planting import CAUGHT, REQUIRED, ROOT, Fault, planted, read_faults, run_planted

FAULTS = read_faults(REQUIRED.read_text())
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["pytest", "hypothesis", "grpc", "pyarrow", "tests.mutants.planting"])
SOURCE = """
class Log:
    def write(self, data):
        if data and self.is_open:
            self.put(data)
            self.sync()
            self.end = min(self.end, len(data))
            self.sync()
"""


def change(text):
    """Return the changed lines of `SOURCE`."""
    tree = planted(SOURCE, Fault("log.py", "Log.write", text, "", ()))
    return "; ".join(line.strip() for line in ast.unparse(tree).splitlines()[2:])


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_fault_is_caught(fault):
    process = PROCESSES.Process(target=run_planted, args=(fault,))
    process.start()
    process.join()
    assert process.exitcode == CAUGHT, f"{', '.join(fault.tests)} pass with it: {fault.promise}"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("without `self.put(data)`", "if data and self.is_open:; pass; self.sync(); self.end = min("),
        ("without `self.sync()` (2)", "self.put(data); self.sync(); self.end = min(self.end, len(data)); pass"),
        ("`if data and self.is_open` -> `if False`", "if False:"),
        ("`data and self.is_open` -> `data and True`", "if data and True:"),
        ("`min(self.end, len(data))` -> `max(self.end, len(data))`", "self.end = max(self.end, len(data))"),
        ("`self.sync()` before `self.put(data)`", "self.sync(); self.put(data); self.end"),
    ],
)
def test_each_form_of_change(text, lines):
    assert lines in change(text)


@pytest.mark.parametrize("text", ["without `self.gone()`", "without `self.sync()` (3)", "no change"])
def test_change_without_a_place_is_refused(text):
    with pytest.raises(LookupError, match=r"update tests/mutants/required\.txt"):
        change(text)


def test_fault_without_a_test_is_refused():
    with pytest.raises(ValueError, match="a test file"):
        read_faults("log.py:Log.write: without `self.put(data)`\n    written before acknowledged\n")


def test_faults_have_a_place_in_the_code():
    for fault in FAULTS:
        planted((ROOT / fault.path).read_text(), fault)
