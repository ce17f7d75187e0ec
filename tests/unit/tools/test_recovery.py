"""Core. RecoverGroup's plan: the chosen copy and the losses, row by row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from qmq.tools import recover_group as recovery
from qmq.tools.call import Exit
from qmq.tools.recover_group import WrongReport, decide, read_copies
from qmq.tools.terminal import show

A, B = "a:1", "b:1"


def rows():
    return [
        {"group": "g", "role": role, "hostname": name, "ip": "10.0.0.1", "servePort": 1, "syncPort": 2}
        for role, name in (("SLAVE", "b"), ("MASTER", "a"))
    ]


def replica(name, *, up, end=100, reasons=(), term=4, **more):
    return more | {
        "hostname": name,
        "servePort": 1,
        "reachable": up,
        "logEnd": end,
        "highWatermark": end,
        "readonlyReasons": list(reasons),
        "lastEpoch": [term, 0],
    }


def report(name, *, end=100, lacks=None, subjects=None, group="g", troubles=(), ids=(), term=4):
    return {
        "directory": "/saved",
        "group": group,
        "hostname": name,
        "servePort": 1,
        "log": {"end": end, "highWatermark": end, "epoch": [term, 0]},
        "acknowledged": None,
        "lacks": lacks and {"end": lacks},
        "subjects": subjects or {},
        "troubles": [{"name": trouble} for trouble in troubles],
        "above": {"ids": [list(id) for id in ids]},
    }


def decided(*, replicas=(), reports=(), gone=(), remembered=0):
    return decide(read_copies(rows(), replicas, reports, gone), remembered=remembered)


def test_silent_copy_blocks_the_decision():
    plan = decided(replicas=[replica("a", up=False), replica("b", up=True)])
    assert not plan.words and "a:1: start it" in plan.steps[0] and "--gone" in plan.steps[0]


SWAP, STAY = {"role": "0", "hostname": "b", "swap": "true"}, {"role": "0", "hostname": "a"}
"""Words of ReplaceBroker: b becomes the master in a's place, or a stays it."""


@pytest.mark.parametrize(
    "replicas, reports, gone, kept, words, accepted",
    [
        pytest.param([replica("a", up=True), replica("b", up=True)], [], [], A, {}, False, id="both run"),
        pytest.param([replica("a", up=True)], [], [B], A, {}, False, id="the slave is gone"),
        pytest.param([], [report("a")], [B], A, {}, False, id="the master's disk is saved"),
        pytest.param([replica("b", up=True)], [], [A], B, SWAP, False, id="the master is gone"),
        pytest.param([], [report("b")], [A], B, SWAP, False, id="the slave's disk is saved"),
        pytest.param(
            [replica("a", up=True, reasons=["rolled_back", "slave_down"])],
            [],
            [B],
            A,
            STAY,
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
            [replica("a", up=True, reasons=["rolled_back"]), replica("b", up=True, end=0, incomplete=True)],
            [],
            [],
            A,
            STAY,
            True,
            id="the master was rolled back, and the slave is an empty broker that it never filled",
        ),
        pytest.param(
            [replica("b", up=True)],
            [report("a", troubles=["file_damaged"])],
            [],
            B,
            SWAP,
            False,
            id="the master does not start",
        ),
        pytest.param(
            [replica("a", up=True, end=0), replica("b", up=True, end=0)],
            [],
            [A, B],
            None,
            STAY,
            True,
            id="empty brokers in both places",
        ),
        pytest.param([], [], [A, B], None, STAY, True, id="neither returns"),
    ],
)
def test_choice_of_the_copy(replicas, reports, gone, kept, words, accepted):
    plan = decided(replicas=replicas, reports=reports, gone=gone)
    assert (plan.keeps and plan.keeps.label, plan.needs_acceptance) == (kept, accepted)
    chosen = {name: value for name, value in plan.words.items() if name in ("role", "hostname", "swap")}
    assert chosen == words


def test_empty_master_is_not_chosen():
    """The master runs on another directory and is not admitted; only an operator can declare the disk lost."""
    replicas = [replica("a", up=True, end=0, otherDirectory=True), replica("b", up=True)]
    plan = decided(replicas=replicas)
    assert not plan.words and "a:1: start it with the data directory" in plan.steps[0] and "--gone" in plan.steps[0]
    assert decided(replicas=replicas, gone=[A]).keeps.label == B


def test_running_brokers_stop_before_they_move():
    """ReplaceBroker refuses while one of them runs."""
    plan = decided(replicas=[replica("a", up=True, reasons=["file_damaged"]), replica("b", up=True)])
    assert plan.keeps.label == B and plan.steps[0] == "stop a:1, b:1"
    assert plan.steps[2:] == ("start a:1", "start b:1")


def test_losses_list_offset_subject_and_id():
    saved = report("a", end=100, lacks=180, subjects={"s": 5, "t": 2}, troubles=["rolled_back"])
    damaged = report("b", end=180, subjects={"s": 8, "t": 2}, ids=[("s", 5, "m5"), ("s", 7, "m7")])
    plan = decided(reports=[saved, damaged], gone=[B])
    assert plan.keeps.label == A and plan.needs_acceptance and plan.lost_offsets == (100, 180)
    assert [tuple(getattr(lost, name) for name in ("subject", "first", "last", "ids")) for lost in plan.lost] == [
        ("s", 5, 7, ("m5", "m7"))
    ]


@pytest.mark.parametrize(
    "kept, gone, words",
    [
        pytest.param("b", A, SWAP, id="the slave's disk"),
        pytest.param("a", B, STAY, id="the master's disk"),
    ],
)
def test_disk_below_the_acknowledged_point_was_restored(kept, gone, words):
    """The copy cannot detect this itself, as all its files are equally old."""
    plan = decided(reports=[report(kept, end=100)], gone=[gone], remembered=150)
    assert plan.lost_offsets == (100, 150) and plan.needs_acceptance
    assert {name: plan.words[name] for name in words} == words
    whole = decided(reports=[report(kept, end=100)], gone=[gone], remembered=100)
    assert whole.lost_offsets is None and not whole.needs_acceptance


def test_acknowledged_messages_are_lost_with_both_copies():
    assert decided(gone=[A, B], remembered=700).lost_offsets == (0, 700)
    plan = decided(replicas=[replica("a", up=False, end=500)], gone=[A, B])
    assert plan.lost_offsets == (0, 500) and "starts again" in plan.steps[0]


@pytest.mark.parametrize(
    "reports, gone, words",
    [
        pytest.param([report("a", group="other")], [], "/saved is of other, not of g", id="report of another group"),
        pytest.param([report("x")], [], "x:1 is no broker of this group", id="report of a stranger"),
        pytest.param([], ["x:1"], "x:1 is no broker of this group", id="a stranger is gone"),
    ],
)
def test_foreign_names_and_reports_are_refused(reports, gone, words):
    with pytest.raises(WrongReport, match=words):
        decided(reports=reports, gone=gone)


# Several slaves. The row is of term 4; `4` and `3` below are the terms of the logs' last frames.


def decided_of_three(states, *, min_copies=2, remembered=0):
    """Decision for a (the master), b and c: each with its state, end, term of its last frame, troubles."""
    brokers = [*rows(), {**rows()[0], "hostname": "c"}]
    replicas, reports, gone = [], [], []
    for name, (state, *known) in zip("abc", states, strict=True):
        end, term, *troubles = (*known, 100, 4)[:2] if len(known) < 3 else known
        if state == "disk":
            reports.append(report(name, end=end, term=term, troubles=troubles))
        else:
            replicas.append(replica(name, up=state == "runs", end=end, term=term, reasons=troubles))
        if state == "gone":
            gone.append(f"{name}:1")
    copies = read_copies(brokers, replicas, reports, gone)
    return decide(copies, term=4, min_copies=min_copies, remembered=remembered)


RUNS, DISK, GONE, SILENT = ("runs", 100, 4), ("disk", 100, 4), ("gone", 100, 4), ("silent", 100, 4)


@pytest.mark.parametrize(
    "states, min_copies, kept, command, accepted",
    [
        pytest.param([RUNS, RUNS, SILENT], 2, A, "", False, id="a slave is silent: the master goes on"),
        pytest.param([SILENT, RUNS, RUNS], 2, None, "", False, id="the master is silent: nobody guesses"),
        pytest.param([GONE, RUNS, RUNS], 2, B, "Failover", False, id="two of two slaves have everything"),
        pytest.param([GONE, RUNS, ("runs", 120, 4)], 2, "c:1", "Failover", False, id="the one with most"),
        pytest.param([GONE, RUNS, SILENT], 2, None, "", False, id="one of two is silent: it may have what b lacks"),
        pytest.param([GONE, RUNS, SILENT], 3, B, "Failover", False, id="all acknowledge: any one has everything"),
        pytest.param([GONE, RUNS, GONE], 2, B, "ReplaceBroker", True, id="one of two is gone: it may have had more"),
        pytest.param([GONE, RUNS, ("runs", 100, 3)], 2, B, "ReplaceBroker", True, id="c followed an older master"),
        pytest.param([GONE, RUNS, DISK], 2, B, "", False, id="c is started first"),
        pytest.param([("disk", 80, 4), GONE, GONE], 2, A, "", False, id="the master's disk is saved"),
        pytest.param([("gone", 150, 4), RUNS, RUNS], 2, B, "ReplaceBroker", True, id="more was acknowledged"),
        pytest.param([("runs", 50, 4, "rolled_back"), RUNS, RUNS], 2, B, "", False, id="the master is refilled"),
        pytest.param(
            [("runs", 50, 4, "rolled_back"), RUNS, GONE], 2, B, "ReplaceBroker", True, id="refilled from too few"
        ),
        pytest.param(
            [("runs", 90, 2, "rolled_back"), ("runs", 40, 2), ("runs", 80, 2)],
            2,
            "c:1",
            "ReplaceBroker",
            True,
            id="all run, and none has what the master lacks",
        ),
        pytest.param(
            [("disk", 90, 2, "rolled_back"), ("runs", 40, 2), ("disk", 80, 2)],
            2,
            "c:1",
            "ReplaceBroker",
            True,
            id="the same, with those stopped that have to be",
        ),
        pytest.param([GONE, GONE, GONE], 2, None, "ReplaceBroker", True, id="none returns"),
    ],
)
def test_choice_among_three_copies(states, min_copies, kept, command, accepted):
    plan = decided_of_three(states, min_copies=min_copies)
    assert (plan.keeps and plan.keeps.label, plan.command, plan.needs_acceptance) == (kept, command, accepted)
    assert "swap" not in plan.words


PARTED = ("runs", 120, 3, "diverged")
OF_C = "set aside the data directory of c:1, stopped, and start it with an empty one: a:1 fills it"


@pytest.mark.parametrize(
    "states, min_copies, steps",
    [
        pytest.param([RUNS, RUNS, PARTED], 2, [OF_C, "a:1 runs", "b:1 runs"], id="two have the log that goes on"),
        pytest.param([RUNS, RUNS, PARTED], 3, [OF_C, "a:1 runs", "b:1 runs"], id="all acknowledge, and two have it"),
        pytest.param(
            [("runs", 100, 4, "diverged"), RUNS, PARTED],
            2,
            [OF_C, "a:1 runs", "b:1 runs"],
            id="the master says it, too",
        ),
        pytest.param([RUNS, SILENT, PARTED], 3, [OF_C, "a:1 runs", "start b:1"], id="all acknowledge: one is enough"),
        pytest.param([RUNS, SILENT, PARTED], 2, ["keep", "a:1 runs", "start b:1"], id="b may have what c confirmed"),
        pytest.param([RUNS, PARTED, PARTED], 2, ["keep", "a:1 runs"], id="two may have acknowledged it"),
        pytest.param([RUNS, ("runs", 90, 3), PARTED], 2, ["keep", "a:1 runs", "b:1 runs"], id="b is of an older term"),
        pytest.param([("runs", 90, 3), RUNS, PARTED], 3, ["keep", "a:1 runs", "b:1 runs"], id="a has not begun"),
    ],
)
def test_diverged_slave_without_acknowledged_frames_is_set_aside(states, min_copies, steps):
    plan = decided_of_three(states, min_copies=min_copies)
    shown = [step[: len(wanted)] for step, wanted in zip(plan.steps, steps, strict=True)]
    assert shown == steps and plan.keeps.label == A and not plan.command


def test_messages_of_the_diverged_copy_are_listed(capsys):
    parted = {"offset": 100, "messages": 3, "subjects": {"s.a": [30, 31], "s.b": [7, 7]}}
    replicas = [replica("a", up=True), replica("b", up=True, reasons=["diverged"], parted=parted)]
    copies = read_copies(rows(), replicas, (), ())
    plan = decide(copies, term=4)
    assert [(loss.subject, loss.first, loss.last, loss.only_at) for loss in plan.maybe_lost] == [
        ("s.a", 30, 31, "b:1"),
        ("s.b", 7, 7, "b:1"),
    ]
    assert plan.keeps.label == A and plan.steps[0].startswith("set aside the data directory of b:1,")
    assert "qmq inspect DIR --above=100" in plan.steps[0]
    show(recovery._shown(copies, plan))
    assert "MAYBE LOST: s.a, sequences 30 to 31 (2): only b:1 has them" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "states, min_copies, kept, command",
    [
        pytest.param([GONE, RUNS, ("runs", 120, 4, "diverged")], 2, "c:1", "ReplaceBroker", id="it has all of b"),
        pytest.param([GONE, RUNS, PARTED], 2, B, "ReplaceBroker", id="b followed a newer master"),
        pytest.param([GONE, RUNS, ("runs", 90, 4, "diverged")], 3, B, "Failover", id="all acknowledge: b is proof"),
        pytest.param([GONE, RUNS, ("runs", 120, 4, "diverged")], 3, "c:1", "ReplaceBroker", id="it knows of more"),
        pytest.param(
            [("runs", 110, 2, "rolled_back"), ("runs", 110, 2), PARTED],
            2,
            "c:1",
            "ReplaceBroker",
            id="it has what the master lacks, whose log was restored from b",
        ),
    ],
)
def test_diverged_slave_with_most_goes_on(states, min_copies, kept, command):
    """A differing log does not show which of the two has more."""
    plan = decided_of_three(states, min_copies=min_copies)
    assert (plan.keeps.label, plan.command) == (kept, command)
    assert plan.needs_acceptance == (command == "ReplaceBroker")


def test_diverged_slave_wins_over_an_incomplete_master():
    replicas = [replica("a", up=True, reasons=["rolled_back"]), replica("b", up=True, reasons=["diverged"])]
    plan = decide(read_copies(rows(), replicas, (), ()), term=4)
    assert plan.keeps.label == B and plan.command == "ReplaceBroker" and plan.needs_acceptance


def test_acknowledged_point_above_all_copies_is_a_loss():
    """A slave may lag; only the plan shows that no copy has the missing frames."""
    assert decided_of_three([("gone", 150, 4), RUNS, RUNS]).lost_offsets == (100, 150)
    plan = decided_of_three([("gone", 0, 0), DISK, ("gone", 0, 0)], remembered=150)
    assert plan.lost_offsets == (100, 150) and plan.keeps.label == B and plan.needs_acceptance
    plan = decided_of_three([("silent", 0, 0), RUNS, ("runs", 160, 4)], remembered=150)
    assert plan.lost_offsets is None


@pytest.mark.parametrize("remembered, lost", [(100, None), (150, (100, 150))])
def test_master_refills_only_from_a_complete_slave(remembered, lost):
    rolled_back = ("runs", 50, 4, "rolled_back")
    of_two = decided(
        replicas=[replica("a", up=True, end=50, reasons=["rolled_back"]), replica("b", up=True)], remembered=remembered
    )
    for plan in (of_two, decided_of_three([rolled_back, RUNS, RUNS], remembered=remembered)):
        assert (plan.keeps.label, plan.lost_offsets) == (B, lost)
        assert (plan.command, plan.needs_acceptance) == (("ReplaceBroker", True) if lost else ("", False))


def test_the_only_copy_is_not_refilled_from_itself():
    copies = read_copies(rows()[1:], [replica("a", up=True, reasons=["rolled_back"])], [], [])
    plan = decide(copies, term=4)
    assert (plan.command, plan.needs_acceptance) == ("ReplaceBroker", True)


@pytest.mark.parametrize("acknowledged, exit", [(None, Exit.UNREACHABLE), (100, Exit.DONE)])
def test_missing_acknowledged_point_blocks_the_decision(monkeypatch, capsys, acknowledged, exit):
    """A fixed bug: no loss was reported although a gone copy had more than the chosen one."""
    status = {
        "replicas": [replica(name, up=True) for name in "ab"],
        "term": 4,
        "minCopies": 2,
        "acknowledged": acknowledged,
    }
    answers = {"ListBrokers": rows(), "ReplicaStatus": [status]}
    monkeypatch.setattr(recovery, "_ask", lambda session, words: answers[words["action"]])
    session = SimpleNamespace(
        values={"brokerGroup": "g", "reports": "", "gone": A}, as_json=False, dry_run=True, command=None
    )
    assert recovery.run(session) is exit
    assert ("database" in capsys.readouterr().err) == (acknowledged is None)
