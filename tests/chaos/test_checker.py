"""Core. The checker names each kind of broken promise in a history made by hand; a sound one has no findings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq.deploy.chaos.checker import CAUSE_S, HELD_S, Logs, check
from qmq.deploy.chaos.history import REFUSED, STORED, UNKNOWN, Acked, Delivered, Fault, History, Sent
from qmq.deploy.copies import Copy
from qmq.log.fold import State
from qmq.log.group import Consumer, Group, UnackedRange
from qmq.log.requeued import Requeued, RequeuedRange


class Frames(Copy):
    """A copy whose frames are messages alone: its end and chain stand for their bytes."""

    @property
    def end(self):
        return len(self.messages)

    @property
    def chain(self):
        return hash(tuple(self.messages))


def copy(*messages):
    state = State(next_sequence={"s": len(messages)}, groups={("s", "g"): Group(len(messages))})
    return Frames(0, messages=list(messages), state=state)


def sent(id, sequence=-1, outcome=STORED, begun=1.0):
    return Sent(id, "s", "one", begun, begun + 0.1, outcome, "g1", sequence)


def delivered(id, sequence, at=2.0, started=0.0):
    return Delivered(id, "s", "g1", sequence, "c1", started, at)


@pytest.fixture
def history():
    return History(
        sent=[sent("a", 0), sent("b", 1, begun=2.0), sent("c", outcome=REFUSED), sent("d", outcome=UNKNOWN)],
        delivered=[delivered("a", 0), delivered("b", 1)],
        acked=[Acked("a", 3.0)],
    )


def findings(history, master=None, slave=None):
    master = master or copy(("s", 0, "a"), ("s", 1, "b"))
    return {finding.rule for finding in check(history, Logs({"g1": (master, slave or master)}))}


def test_a_sound_history_has_no_findings(history):
    assert findings(history) == set()
    unknown_is_there = copy(("s", 0, "a"), ("s", 1, "b"), ("s", 2, "d"))
    assert findings(history, unknown_is_there) == set()


@pytest.mark.parametrize(
    "rules, master, slave",
    [
        pytest.param(
            {"lost-copy", "copies-differ"}, [("s", 0, "a"), ("s", 1, "b")], [("s", 0, "a")], id="slave lacks it"
        ),
        pytest.param(
            {"lost-copy", "copies-differ", "consumed-unsent"},
            [("s", 0, "a")],
            [("s", 0, "a"), ("s", 1, "b")],
            id="master lacks it",
        ),
        pytest.param({"lost-copy", "consumed-unsent"}, [("s", 0, "b"), ("s", 1, "a")], None, id="at another sequence"),
        pytest.param({"duplicate"}, [("s", 0, "a"), ("s", 1, "b"), ("s", 2, "d"), ("s", 3, "d")], None, id="twice"),
        pytest.param({"refused-stored"}, [("s", 0, "a"), ("s", 1, "b"), ("s", 2, "c")], None, id="told not stored"),
        pytest.param({"unsent"}, [("s", 0, "a"), ("s", 1, "b"), ("s", 2, "x")], None, id="nobody sent it"),
        pytest.param({"sequence"}, [("s", 0, "a"), ("s", 1, "b"), ("s", 3, "d")], None, id="gap"),
    ],
)
def test_wrong_logs_are_named(history, rules, master, slave):
    assert rules <= findings(history, copy(*master), copy(*(slave or master)))


def test_another_order_than_the_sender_had_is_named(history):
    history.sent[:2] = [sent("b", 1), sent("a", 0)]
    assert findings(history) == {"order"}


def test_a_message_that_nobody_got_is_named(history):
    del history.delivered[1]
    assert findings(history) == {"never-consumed"}


def test_a_second_delivery_needs_a_cause(history):
    history.delivered.append(delivered("b", 1, at=20.0))
    assert findings(history) == {"duplicate-no-cause"}
    history.faults.append(Fault("kill master", "g2", 10.0, 11.0))
    assert findings(history) == {"duplicate-no-cause"}, "another group's fault explains nothing"
    history.faults.append(Fault("kill master", "g1", 10.0, 11.0))
    assert findings(history) == set()
    history.faults[-1] = Fault("kill master", "g1", 0.0, 1.9 - CAUSE_S - history.lease_s)
    assert findings(history) == {"duplicate-no-cause"}


@pytest.mark.parametrize("again", [delivered("a", 0, at=3.0 + HELD_S + 1), delivered("a", 0, at=4.0, started=3.5)])
def test_a_delivery_after_the_ack_was_answered_is_named(history, again):
    history.delivered.append(again)
    history.faults.append(Fault("kill master", "g1", 0.0, 100.0))
    assert findings(history) == {"ack-went-back"}
    history.delivered[-1] = again._replace(at=2.5, started=0.0)
    assert findings(history) == set(), "it came before"


@pytest.mark.parametrize(
    ("begin", "end", "group", "is_named"),
    [(1.5, 3.0, "g1", 1), (1.5, 3.0, "g2", 0), (2.0, 3.0, "g1", 0), (1.5, 2.1, "g1", 0)],
)
def test_acknowledgement_while_the_slave_is_stopped_is_a_lost_copy(history, begin, end, group, is_named):
    history.slave_stopped.append(Fault("stop slave", group, begin, end))
    assert findings(history) == ({"lost-copy"} if is_named else set())


def test_an_acknowledgement_while_marked_readonly_is_named(history):
    history.marked.append(Fault("mark", "g1", 1.5, 3.0))
    assert findings(history) == {"readonly-leak"}
    history.marked = [history.marked[0]._replace(group="g2")]
    assert findings(history) == set()


@pytest.mark.parametrize(
    "group",
    [
        Group(1),
        Group(2, requeued=Requeued([RequeuedRange(0, 1, 1, 0)])),
        Group(2, consumers={"c": Consumer(unacked=[UnackedRange(0, 0, 1, 1)])}),
    ],
)
def test_what_is_left_over_at_the_end_is_named(history, group):
    master = copy(("s", 0, "a"), ("s", 1, "b"))
    master.state = replace(master.state, groups={("s", "g"): group})
    assert findings(history, master) == {"not-drained"}


def test_a_journal_that_a_kill_tore_is_read_up_to_there():
    history = History()
    history.read_consumer(["D a s g1 0 c1 0.5 2.0\n", "A a 3.0\n", "D b s g1 1 c1 0.5 2"])
    assert history.delivered == [delivered("a", 0, started=0.5)] and history.acked == [Acked("a", 3.0)]
