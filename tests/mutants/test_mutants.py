"""Core. The runner of mutants: what it changes, what it leaves alone, and that a fault is noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.__main__ import paths_of, product_files
from tests.mutants.explained import EXPLAINED, REQUIRED, read_table
from tests.mutants.operators import Mutant, mutants

ROOT = Path(__file__).parents[2]


def made_of(folder: Path, source: str) -> list[Mutant]:
    (folder / "module.py").write_text(source)
    return list(mutants(folder, "module.py"))


def run(mutant: Mutant, *arguments: object) -> object:
    """Call the mutated function, which needs nothing from around it."""
    return eval(mutant.code, {}) if not arguments else type(run)(mutant.code, {})(*arguments)


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("return a < b", {"`a < b` -> `a <= b`"}),
        ("return a and b", {"`a and b` -> `True and b`", "`a and b` -> `a and True`"}),
        ("return not a", {"`not a` -> `not not a`"}),
        ("return max(a, b)", {"`max(a, b)` -> `min(a, b)`"}),
        ("return a + 1", {"`a + 1` -> `a - 1`", "`1` -> `2`"}),
        ("a.sync()", {"without `a.sync()`"}),
        ("a.end = b", {"without `a.end = b`"}),
        ("del a[b]", {"without `del a[b]`"}),
        ("return a if b else 0", {"`if b` -> `if False`", "`if b` -> `if True`", "`0` -> `1`"}),
    ],
)
def test_each_kind_of_fault(tmp_path, line, changes):
    assert {mutant.change for mutant in made_of(tmp_path, f"def f(a, b):\n    {line}\n")} == changes


def test_order_of_two_effects_is_turned_round_where_it_may_matter(tmp_path):
    effects = "def f(self, a):\n    self.x = a\n    self.sync()\n    self.y = a\n    self.z = a\n"
    swaps = [mutant.change for mutant in made_of(tmp_path, effects) if " before " in mutant.change]
    assert swaps == ["`self.sync()` before `self.x = a`", "`self.y = a` before `self.sync()`"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("self.x += len(a)", "self.y.append(a)"),
        ("self.x.pop(a, None)", "del self.y[a]"),
        ("self.x.get(a, {}).pop(a, None)", "self.y.setdefault(a, {})[a] = a"),
        ("heappush(self.x, (1, a))", "self.y.clear()"),
        ("self._counters.acked += 1", "self.log.append(1, a)"),
    ],
)
def test_order_of_two_places_in_memory_is_left_alone(tmp_path, one, other):
    source = f"def f(self, a):\n    {one}\n    {other}\n"
    assert all(" before " not in mutant.change for mutant in made_of(tmp_path, source))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("self.x.append(a)", "self.y += len(self.x)"),
        ("self.x = self.y.end", "self.y = a"),
        ("self.x += 1", "self.log.append(1, a)"),
        ("self.x += 1", "self.y.append(self.sent())"),
        ("self.x += 1", "await self.sent()"),
        ("self.x.pop(a)", "self.sync()"),
    ],
)
def test_order_is_turned_round_where_one_looks_at_the_other_or_does_more(tmp_path, one, other):
    source = f"async def f(self, a):\n    {one}\n    {other}\n"
    assert sum(" before " in mutant.change for mutant in made_of(tmp_path, source)) == 1


def test_order_of_two_checks_is_left_alone(tmp_path):
    checks = "def f(self, a):\n    check_name(a)\n    self._check_held(a)\n"
    assert all(" before " not in mutant.change for mutant in made_of(tmp_path, checks))


def test_what_is_only_said_is_left_alone(tmp_path):
    source = 'def f(a):\n    """1"""\n    log.info("%d", a + 1)\n    assert a > 1\n    if a:\n        raise E(1)\n'
    assert {mutant.change for mutant in made_of(tmp_path, source)} == {"`if a` -> `if False`", "`if a` -> `if True`"}


def test_what_is_checked_only_for_a_tripwire_is_left_alone(tmp_path):
    source = "def f(a):\n    if a > 1:\n        raise BrokenInvariant('I6')\n    return 'x' if a else 'y'\n"
    assert made_of(tmp_path, source) == []


def test_lines_of_a_fault_are_those_of_its_statement(tmp_path):
    source = "def f(a):\n    if (\n        a\n        and g(1)\n    ):\n        a.x(\n            2\n        )\n"
    lines = {mutant.change: mutant.lines for mutant in made_of(tmp_path, source)}
    assert lines["`1` -> `2`"] == range(2, 6) and lines["`2` -> `3`"] == range(6, 9)


def test_mutated_function_does_what_the_change_says(tmp_path):
    by_change = {mutant.change: mutant for mutant in made_of(tmp_path, "def f(a, b):\n    return a < b\n")}
    assert run(by_change["`a < b` -> `a <= b`"], 1, 1) is True


def test_tree_is_as_before_after_each_fault(tmp_path):
    source = "def f(a, b):\n    a.x()\n    b.y()\n    return a < b and b < 3\n"
    first, again = made_of(tmp_path, source), made_of(tmp_path, source)
    assert [(m.name, m.code) for m in first] == [(m.name, m.code) for m in again]
    assert len({m.code for m in first}) == len(first)


def test_equal_changes_in_one_function_have_names_of_their_own(tmp_path):
    names = [m.name for m in made_of(tmp_path, "def f(a):\n    a.x()\n    a.x()\n") if "without" in m.change]
    assert names == ["module.py:f: without `a.x()`", "module.py:f: without `a.x()` (2)"]


@pytest.mark.parametrize("table", [EXPLAINED, REQUIRED])
def test_tables_name_mutants_that_exist(table):
    names = read_table(table)
    existing = {mutant.name for path in paths_of(names) for mutant in mutants(ROOT, path)}
    assert sorted(set(names) - existing) == []


def test_what_must_be_caught_is_not_explained():
    assert read_table(EXPLAINED).keys().isdisjoint(read_table(REQUIRED))


@pytest.mark.parametrize("text", ["a.py:f: x\n", "    a reason\n", "a.py:f: x\na.py:g: y\n    a reason\n"])
def test_table_without_reasons_is_refused(tmp_path, text):
    (tmp_path / "t").write_text(text)
    with pytest.raises(ValueError, match="reason"):
        read_table(tmp_path / "t")


def test_areas_are_the_modules_that_promises_rest_on():
    files = product_files(["qmq/replication", "broker"])
    assert {"qmq/replication/ack_gate.py", "broker/subscriptions.py"} <= set(files)


def test_a_run_plants_faults_and_sees_a_test_fail(tmp_path):
    """Whatever pytest and its plugins do around it: a runner that plants nothing finds survivors only. Files of tests
    may have the name of another one."""
    output = tmp_path / "mutants.json"
    tests = [f"tests/unit/{name}.py" for name in ("log/test_group", "audit/test_group")]
    options = ["--sample", "5", "--seeds", "0", "--jobs", "1", "--output", str(output), "--tests", *tests]
    command = [sys.executable, "-m", "tests.mutants", "qmq/log/group.py", *options]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "95 % between" in ran.stdout, ran.stdout + ran.stderr
    assert any(by.startswith(tests[0]) for _, by, _ in json.loads(output.read_text())), ran.stdout
