"""Shell. Refusals of an audit before it reads: without two copies nothing can be proven."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qmq.audit.copies import CannotRead, is_same_place, place_options
from qmq.audit.delay_groups import Account
from qmq.audit.executors import Executors
from qmq.audit.findings import FINDINGS
from qmq.audit.group import _account_for_delays, audit_group, check_kept, freeze
from qmq.audit.report import as_markdown
from qmq.audit.results import Group, Result
from qmq.audit.wave import Audit, Options
from tests.unit.audit.forged import write_world

NO_SPARK: Any = None


@pytest.mark.parametrize(
    "one, other, is_same",
    [
        pytest.param("b1", "b1", True, id="one directory"),
        pytest.param("b1", "b1/log", True, id="a directory and its log"),
        pytest.param("b1", "link", True, id="a link to it"),
        pytest.param("b1", "b2", False, id="two directories"),
        pytest.param("10.0.0.1:20883", "10.0.0.1:20883", True, id="one broker"),
        pytest.param("10.0.0.1:20883", "10.0.0.2:20883", False, id="two brokers"),
        pytest.param("b1", "10.0.0.1:20883", False, id="a directory and a broker"),
    ],
)
def test_one_copy_compared_with_itself_proves_nothing(tmp_path: Path, one: str, other: str, is_same: bool) -> None:
    for name in ("b1", "b2"):
        (tmp_path / name / "log").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "b1")
    places = [place_options(place if ":" in place else str(tmp_path / place), "") for place in (one, other)]
    assert is_same_place(*places) == is_same
    if is_same:
        result = audit_group(NO_SPARK, Group("g1", dict(zip(("master", "slave"), places))))
        assert result.status == 2 and "the same place" in str(result.unreadable)


def test_group_without_a_copy_is_not_proven() -> None:
    result = audit_group(NO_SPARK, Group("g1", {"master": {"broker": "10.0.0.1:20883"}}))
    assert result.status == 2
    assert "Nothing is proven: broker group g1 has no slave" in as_markdown([result], 1.0)


def test_copy_reseeded_meanwhile_proves_nothing(tmp_path: Path) -> None:
    """It has all of the log again, so the frames missing meanwhile are no finding."""
    places = {}
    for name in ("master", "slave"):
        places[name] = place_options(str(write_world(tmp_path / name, rounds=2).folder.parent), "")
        (tmp_path / name / "broker.json").write_text(json.dumps({"group": "g1", "incarnation": name}))
    group, result = Group("g1", places), Result("g1", {})
    freeze(group, result)
    check_kept(group, result)
    (tmp_path / "slave" / "broker.json").write_text(json.dumps({"group": "g1", "incarnation": "another"}))
    with pytest.raises(CannotRead, match="the slave was emptied or replaced"):
        check_kept(group, result)


def test_findings_before_a_copy_left_are_reported() -> None:
    result = Result("g1", {"master": "a", "slave": "b"}, unreadable="broker 10.0.0.1:20883: UNAVAILABLE")
    row = dict.fromkeys(FINDINGS) | {"what": "missing", "copy": "slave", "offset": 77}
    result.findings, result.found = [row], {"missing": 1}
    report = as_markdown([result], 1.0)
    assert "Nothing is proven: broker 10.0.0.1:20883: UNAVAILABLE" in report
    assert "| missing | slave | 77 |" in report


def test_id_of_an_application_stays_within_its_cell() -> None:
    result = Result("g1", {"master": "a", "slave": "b"}, unreadable="gone")
    row = dict.fromkeys(FINDINGS) | {"what": "missing", "copy": "slave", "id": "a\n| b |\r\u2028c"}
    result.findings, result.found = [row], {"missing": 1}
    assert "| missing | slave |  |  |  | a \\| b \\| c |  |" in as_markdown([result], 1.0).splitlines()


@pytest.mark.parametrize("known, says, is_accounted", [(True, "", True), (False, "b", True), (False, "", False)])
def test_delay_group_between_masterships_is_accounted_for(
    monkeypatch: pytest.MonkeyPatch, known: bool, says: str, is_accounted: bool
) -> None:
    """It reports the role of a broker's slave, just when due messages wait."""
    unsent = Account([], [{"what": "unsent", "subject": "a", "sequence": 1, "offset": 8, "text": "due"}], [], {})
    monkeypatch.setattr("qmq.audit.group.is_delay_group", lambda place: place["broker"] == says)
    monkeypatch.setattr("qmq.audit.group.account_for", lambda *about, **options: unsent)
    group = Group("d1", {"master": {"broker": "a"}, "slave": {"broker": "b"}}, is_delay=known)
    audit = Audit(group, Result("d1", {}))
    _account_for_delays(Executors(lambda: NO_SPARK), audit, [group], Options())
    assert audit.result.found == ({"unsent": 1} if is_accounted else {})
