"""Core. What the hunt knows of tests: which statements they execute, until when that holds, and what a sample says."""

from __future__ import annotations

import builtins
import gc
from types import FunctionType

import pytest

from qmq.replication.ack_gate import AckGate
from tests.mutants import reach
from tests.mutants.__main__ import AREAS, drawn, interval
from tests.mutants.hunt import Hunter
from tests.mutants.marks import MARK, marked
from tests.mutants.reach import Reach, key_of, live_functions

SOURCE = """def f(a):
    if a > 1:
        try:
            a = a.x
        except AttributeError:
            a = 0
    match a:
        case 0:
            return 1
        case 1: return 2
"""


@pytest.mark.parametrize(
    ("argument", "value", "lines"),
    [(2, 1, {2, 3, 4, 6, 7, 9}), (1, 2, {2, 7, 10}), (0, 1, {2, 7, 9})],
)
def test_marked_function_does_the_same_and_notes_its_statements(tmp_path, monkeypatch, argument, value, lines):
    (tmp_path / "module.py").write_text(SOURCE)
    ((_, code),) = marked(tmp_path, "module.py")
    reached: set[tuple[str, int]] = set()
    monkeypatch.setattr(builtins, MARK, reached.add, raising=False)
    assert FunctionType(code, {})(argument) == value
    assert reached == {("module.py", line) for line in lines}


def test_functions_are_found_that_the_collector_of_circles_does_not_look_at_any_more():
    """As all are that were imported before the tests began (tests/conftest.py)."""
    gc.freeze()
    try:
        assert live_functions()[key_of(AckGate.stored.__code__)] == [AckGate.stored]
    finally:
        gc.freeze()


@pytest.fixture
def learning(tmp_path, monkeypatch):
    """Return (a folder with a test file and a module, what asks for the test and says whether it was known)."""
    monkeypatch.setattr(reach, "ROOT", tmp_path)
    monkeypatch.setattr(
        reach, "runs_of", lambda named, *_: [reach.Run(named[0][0], 0, False, frozenset({("m.py", 7), ("m.py", 8)}))]
    )
    (tmp_path / "m.py").write_text(MODULE)
    for name in ("t.py", "other.py"):
        (tmp_path / name).write_text(name)

    def is_known(test: str = "a", lines: tuple[int, ...] = (7, 8)) -> bool:
        forget()
        learnt = Reach(tmp_path / ".run" / "reach", ("m.py",))
        learnt.load()
        (run,), was_known = learnt.of("t.py", [(test, bool)], {})
        assert run.lines == {("m.py", line) for line in lines}
        return was_known

    yield tmp_path, is_known
    forget()


def forget() -> None:
    for one in (reach.digest_of, reach.parts_of, reach._lines_of, reach._names_by_line):
        one.cache_clear()


MODULE = """LIMIT = 1

class A:
    def before(self): return 1
    @property
    def reached(self):
        a = 1
        return a
"""


def test_what_is_learnt_is_kept_for_the_next_run(learning):
    folder, is_known = learning
    assert not is_known()
    (folder / "other.py").write_text("changed: no test executes it")
    assert is_known()
    assert not is_known("b")


def test_what_is_learnt_ends_when_the_test_changes(learning):
    folder, is_known = learning
    is_known()
    (folder / "t.py").write_text("changed")
    assert not is_known()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("return a\n", "return 2\n", id="a line"),
        pytest.param("    @property\n", "", id="how it is wrapped"),
        pytest.param("LIMIT = 1", "LIMIT = 2", id="what stands around it"),
        pytest.param("def reached", "def renamed", id="its name"),
    ],
)
def test_what_is_learnt_ends_when_a_function_that_was_executed_changes(learning, old, new):
    folder, is_known = learning
    is_known()
    assert old in MODULE
    (folder / "m.py").write_text(MODULE.replace(old, new))
    assert not is_known()


def test_what_is_learnt_goes_along_when_another_function_changes(learning):
    folder, is_known = learning
    is_known()
    (folder / "m.py").write_text(MODULE.replace("return 1\n", "\n        a = 1\n        return a\n"))
    assert is_known(lines=(9, 10))


def test_who_fails_without_a_mutant_catches_none(tmp_path):
    runs: list[str] = []
    hunter = Hunter([], 0, 1, Reach(tmp_path / "reach", AREAS), runs.append)
    hunter._named = {"red": lambda: True, "green": lambda: False}
    assert not hunter._passes("red") and "red" not in hunter._named
    assert hunter._passes("green") and hunter._passes("memory") and hunter._passes("")


def test_sample_is_the_same_for_a_seed_and_never_larger_than_the_area():
    area = list(range(1000))
    assert drawn(area, 100, 1) == drawn(area, 100, 1) != drawn(area, 100, 2)
    assert sorted(drawn(area, 2000, 1)) == area


@pytest.mark.parametrize(
    ("caught", "planted", "bounds"), [(95, 100, (0.888, 0.978)), (100, 100, (0.963, 1.0)), (0, 0, (0.0, 1.0))]
)
def test_interval_of_a_share(caught, planted, bounds):
    assert interval(caught, planted) == pytest.approx(bounds, abs=0.001)
