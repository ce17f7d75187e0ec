"""Core. Display of a plan: reach, changes, objections."""

from __future__ import annotations

from qmq.tools.commands import COMMANDS
from qmq.tools.session import refusal, show_plan
from qmq.tools.table import plain

WORDS = {"action": "MarkReadonlyBrokerGroup", "brokerGroup": "g1", "subject": "*"}


def preview(**changes):
    names = [f"s{number}" for number in range(20)]
    return {
        "dryRun": True,
        "wouldChange": True,
        "reasons": [],
        "objections": [],
        "blastRadius": "1,234 subjects, 1 group, 40 clients",
        "subjects": {"count": 1234, "names": names},
        "groups": {"count": 1, "names": ["g1"]},
        "clients": 40,
        "before": {"readonlySubjects": [], "term": 3, "master": {"ip": "10.0.0.1", "up": True}},
        "after": {"readonlySubjects": ["*"], "term": 3, "master": {"ip": "10.0.0.2", "up": True}},
    } | changes


def shown(**changes):
    return plain(show_plan(COMMANDS["MarkReadonly"], WORDS, preview(**changes)))


def test_plan_shows_reach_and_changes_only():
    text = shown()
    assert text.startswith("MarkReadonly brokerGroup=g1 subject=*\naffects 1,234 subjects, 1 group, 40 clients\n")
    assert "s11 and 1,222 more" in text and "s12" not in text
    assert [line.split() for line in text.splitlines()[-3:]] == [
        ["CHANGES", "FROM", "TO"],
        ["readonlySubjects", "-", "*"],
        ["master.ip", "10.0.0.1", "10.0.0.2"],
    ]


def test_plan_without_changes():
    same = {"wouldChange": False, "before": {"a": 1}, "after": {"a": 1}}
    assert shown(**same).endswith("nothing would change")


def test_plan_shows_refusal_and_objections():
    text = shown(reasons=["no such group"], objections=["5 messages wait there"], wouldChange=False)
    assert "objection: 5 messages wait there" in text and text.endswith("it would be refused")
    assert refusal(preview(reasons=["a", "b"])) == "a; b" and refusal(preview()) == ""


def test_a_document_is_not_shown_whole():
    assert "(5,000 characters)" in plain(show_plan(COMMANDS["Restore"], {"backup": "x" * 5000}, preview()))


def test_nested_fields_are_compared():
    text = shown(before={"slave": None}, after={"slave": {"hostname": "b"}})
    assert text.splitlines()[-1].split() == ["slave.hostname", "-", "b"]
