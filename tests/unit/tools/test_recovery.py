"""Core. RecoverGroup's plan: which copy goes on, and what is lost, row by row."""

from __future__ import annotations

import pytest

from qmq.tools.recovery.plan import WrongReport, decide, read_copies

A, B = "a:1", "b:1"


def rows():
    return [
        {"group": "g", "role": role, "hostname": name, "ip": "10.0.0.1", "servePort": 1, "syncPort": 2}
        for role, name in (("SLAVE", "b"), ("MASTER", "a"))
    ]


def replica(name, *, up, end=100, reasons=()):
    return {
        "hostname": name,
        "servePort": 1,
        "reachable": up,
        "logEnd": end,
        "highWatermark": end,
        "readonlyReasons": list(reasons),
    }


def report(name, *, end=100, lacks=None, subjects=None, group="g", troubles=(), ids=()):
    return {
        "directory": "/saved",
        "group": group,
        "hostname": name,
        "servePort": 1,
        "log": {"end": end, "highWatermark": end},
        "acknowledged": None,
        "lacks": lacks and {"end": lacks},
        "subjects": subjects or {},
        "troubles": [{"name": trouble} for trouble in troubles],
        "above": {"ids": [list(one) for one in ids]},
    }


def decided(*, replicas=(), reports=(), gone=()):
    return decide(read_copies(rows(), replicas, reports, gone))


def test_of_a_copy_that_is_only_silent_nothing_is_decided():
    plan = decided(replicas=[replica("a", up=False), replica("b", up=True)])
    assert not plan.words and "a:1: start it" in plan.steps[0] and "--gone" in plan.steps[0]


@pytest.mark.parametrize(
    "replicas, reports, gone, kept, words, accepted",
    [
        pytest.param([replica("a", up=True), replica("b", up=True)], [], [], A, {}, False, id="both run"),
        pytest.param([replica("a", up=True)], [], [B], A, {}, False, id="the slave is gone"),
        pytest.param([], [report("a")], [B], A, {}, False, id="the master's disk is saved"),
        pytest.param(
            [replica("b", up=True)],
            [],
            [A],
            B,
            {"role": "0", "hostname": "b", "swap": "true"},
            False,
            id="the master is gone",
        ),
        pytest.param(
            [],
            [report("b")],
            [A],
            B,
            {"role": "0", "hostname": "b", "swap": "true"},
            False,
            id="the slave's disk is saved",
        ),
        pytest.param(
            [replica("a", up=True, reasons=["rolled_back", "slave_down"])],
            [],
            [B],
            A,
            {"role": "0", "hostname": "a"},
            True,
            id="the master was rolled back",
        ),
        pytest.param(
            [replica("a", up=True, reasons=["rolled_back"]), replica("b", up=True)],
            [],
            [],
            B,
            {},
            False,
            id="the master was rolled back, and is refilled",
        ),
        pytest.param(
            [replica("b", up=True)],
            [report("a", troubles=["file_damaged"])],
            [],
            B,
            {"role": "0", "hostname": "b", "swap": "true"},
            False,
            id="the master does not start",
        ),
        pytest.param(
            [replica("a", up=True, end=0), replica("b", up=True, end=0)],
            [],
            [A, B],
            None,
            {"role": "0", "hostname": "a"},
            True,
            id="empty brokers in both places",
        ),
        pytest.param([], [], [A, B], None, {"role": "0", "hostname": "a"}, True, id="neither returns"),
    ],
)
def test_which_copy_goes_on(replicas, reports, gone, kept, words, accepted):
    plan = decided(replicas=replicas, reports=reports, gone=gone)
    assert (plan.keeps and plan.keeps.who, plan.needs_acceptance) == (kept, accepted)
    chosen = {name: value for name, value in plan.words.items() if name in ("role", "hostname", "swap")}
    assert chosen == words


def test_what_is_lost_is_named_by_offset_subject_and_id():
    saved = report("a", end=100, lacks=180, subjects={"s": 5, "t": 2}, troubles=["rolled_back"])
    damaged = report("b", end=180, subjects={"s": 8, "t": 2}, ids=[("s", 5, "m5"), ("s", 7, "m7")])
    plan = decided(reports=[saved, damaged], gone=[B])
    assert plan.keeps.who == A and plan.needs_acceptance and plan.lost_offsets == (100, 180)
    assert [tuple(getattr(lost, name) for name in ("subject", "first", "last", "ids")) for lost in plan.lost] == [
        ("s", 5, 7, ("m5", "m7"))
    ]


def test_all_that_was_acknowledged_is_lost_with_both():
    plan = decided(replicas=[replica("a", up=False, end=500)], gone=[A, B])
    assert plan.lost_offsets == (0, 500) and "begins anew" in plan.steps[0]


@pytest.mark.parametrize(
    "reports, gone, words",
    [
        pytest.param([report("a", group="other")], [], "/saved is of other, not of g", id="report of another group"),
        pytest.param([report("x")], [], "x:1 is no broker of this group", id="report of a stranger"),
        pytest.param([], ["x:1"], "x:1 is no broker of this group", id="a stranger is gone"),
    ],
)
def test_what_fits_nothing_of_the_group_is_refused(reports, gone, words):
    with pytest.raises(WrongReport, match=words):
        decided(reports=reports, gone=gone)
