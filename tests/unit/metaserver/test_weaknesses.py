"""Each known weakness of QMQ's metaserver and tools has a test that would fail on it.

The docstring of such a test begins with "Weakness 4: …" or "Weaknesses 4 and 17: …". `pytest -v` of this module shows
the tests of each weakness.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

WEAKNESSES = {
    1: "one bad row in the database stops every refresh at every metaserver",
    2: "the database's errors are swallowed: cut names, no address, nothing updated, and the answer is ok",
    3: "subjects longer than their column",
    4: "names that differ in upper and lower case only are one row and two entries of a cache",
    5: "limits of columns that disagree",
    6: "changes without a repetition after a lost race, `*` half done",
    7: "a group is taken out of routes while it holds messages, without a drain",
    8: "nothing can be deleted, and tables grow for ever",
    9: "routes that name groups which do not exist or are of the wrong kind",
    10: "no version of the schema and no migrations",
    11: "liveness is in the memory of one metaserver: wrong after a move, missing after a restart",
    12: "a heartbeat's sender is not checked; refusals of registrations are ignored",
    13: "any process can claim any group; two masters without alarm",
    14: "slaves are invisible",
    15: "SQL in the way of requests: a slow database stalls everybody, and requests get no answer",
    16: "the first error of the database stops a cache",
    17: "a subject with few groups depends on the database at each poll",
    18: "an error empties a consumer's route",
    19: "readonly everywhere has no effect on producers",
    20: "readonly marks are slow, and their effect on clients is unknown",
    21: "new routes ignore marks, states and load",
    22: "the documented swap fails, and copies diverge silently",
    23: "no orderly stop, no health check, a used port goes unnoticed, no start without the database",
    24: "a planned stop looks like a crash",
    25: "clients poll everything, always",
    26: "changes by GET without a token; lists are open",
    27: "no authentication on the port of brokers and clients",
    28: "tokens in clear text, with all rights, for ever",
    29: "passwords of databases in clear text and on command lines",
    30: "stack traces and SQL in answers",
    31: "no limits: frames, idle connections, subjects",
    32: "no audit trail",
    33: "ResetOffset never works; exit status 0 for everything; no dry run",
    34: "the tool gives up while the server goes on",
    35: "ResetOffset is lost at a restart, done in part, and accepts no time",
    36: "answers of three shapes, two languages and wrong charset",
    37: "no query of one route, of marks, of offline states, of live clients",
    38: "tools.sh ignores JAVA_HOME and splits arguments",
    39: "shipped configuration that does not start; unused settings; defaults that differ from the documents",
    40: "tags can be set by SQL only",
}

_NAMED = re.compile(r"\bWeakness(?:es)? (\d+(?:(?:, | and |, and )\d+)*)")


def named_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number of a weakness, node id) of each test with one in its docstring."""
    module = ast.parse(path.read_text(), str(path))
    for parent in ast.walk(module):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                owner = f"::{parent.name}" if isinstance(parent, ast.ClassDef) else ""
                for numbers in _NAMED.findall(ast.get_docstring(node) or ""):
                    for number in re.findall(r"\d+", numbers):
                        yield int(number), f"{path.relative_to(ROOT).as_posix()}{owner}::{node.name}"


@pytest.fixture(scope="module")
def tests_of() -> dict[int, list[str]]:
    found = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for number, test in named_in(path):
            found[number].append(test)
    return found


@pytest.mark.parametrize("number", WEAKNESSES)
def test_weakness_has_a_test(number, tests_of):
    assert tests_of[number], f"no test's docstring begins with: Weakness {number}: ({WEAKNESSES[number]})"
    print(number, WEAKNESSES[number], *tests_of[number], sep="\n    ")


def test_named_weaknesses_exist(tests_of):
    assert set(tests_of) <= set(WEAKNESSES)
