"""Shell. Tables of the runbook: each readonly reason and each refusal in the code has a row, and the row's test
exists.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from qmq.replication.readonly import Reason, explain

ROOT = Path(__file__).parents[2]
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
ONLY_WORDS = "parse_"
"""Functions that refuse misspelt arguments; their errors contain the remedy."""
STARTS = {
    "qmq/log/disk.py": {"one_process"},
    "qmq/replication/identity.py": {"_decode"},
    "qmq/replication/node.py": {"assign"},
    "metaserver/cluster/liveness.py": {"check_free"},
    "metaserver/cluster/registration.py": {"_check_place"},
    "metaserver/roles/rules.py": {"refuse_unknown", "check_group", "check_kind", "check_registration"},
}
"""Functions that refuse a starting process."""


def rows(heading):
    """Return the first and last cell of each row of the table below a heading, without markup."""
    section = RUNBOOK.partition(f"### {heading}\n")[2].partition("\n#")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[-1].strip("`") for cells in lines}


REASONS = rows("Reasons for readonly")
REFUSED_STARTS = rows("A broker does not start, or gets no part")
REFUSED_ROLES = rows("A command about roles is refused")


def raised(path, wanted):
    """Return the error texts that the functions of a file raise, without their variable parts."""
    functions = [node for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)]
    raises = [
        node
        for function in functions
        if wanted(function.name)
        for node in ast.walk(function)
        if isinstance(node, ast.Raise)
    ]
    texts = []
    for node in raises:
        parts = [
            part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        if parts:
            texts.append(" … ".join(parts))
    assert texts, f"{path} raises nothing"
    return texts


def without_a_row(texts, table):
    return [text for text in texts if not any(phrase in text for phrase in table)]


def test_each_reason_has_its_row():
    assert set(REASONS) == set(Reason)


def test_manual_reasons_name_the_command():
    """The simulator's operators follow the commands in these texts (tests/simulation/cores/operator.py)."""
    assert {reason for reason in Reason if "RecoverGroup" in explain(reason)} == {Reason.ROLLED_BACK, Reason.DIVERGED}


def test_each_refusal_to_start_has_its_row():
    texts = [text for path, names in STARTS.items() for text in raised(path, names.__contains__)]
    assert without_a_row(texts, REFUSED_STARTS) == []


def test_each_refusal_of_a_role_has_its_row():
    others = STARTS["metaserver/roles/rules.py"]
    texts = raised("metaserver/roles/rules.py", lambda name: name not in others and not name.startswith(ONLY_WORDS))
    texts += raised("metaserver/cluster/old_database.py", lambda name: name == "adopt")
    assert len(texts) > 15 and without_a_row(texts, REFUSED_ROLES) == []


def test_every_row_is_of_a_current_text():
    files = [ROOT / path for path in STARTS]
    files += [path for folder in ("metaserver", "tools") for path in (ROOT / folder).rglob("*.py")]
    texts = [
        node.value
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    phrases = [cell.partition("`")[0] for cell in (*REFUSED_STARTS, *REFUSED_ROLES)]
    assert [phrase for phrase in phrases if not any(phrase in text for text in texts)] == []


@pytest.fixture(scope="module")
def known_tests():
    return set(
        re.findall(r"def (test_\w+)", "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py")))
    )


@pytest.mark.parametrize("table", [REASONS, REFUSED_STARTS, REFUSED_ROLES], ids=["reasons", "starts", "roles"])
def test_each_row_names_the_test_that_tried_it(table, known_tests):
    assert table and {name for name in table.values() if name not in known_tests} == set()
