"""Core. The checker names each kind of broken promise in a history made by hand; in a sound one it finds nothing."""

from __future__ import annotations

from itertools import count

import pytest

from qmq.deploy.chaos.checker import check
from qmq.deploy.chaos.history import CAUSE_S, History
from qmq.deploy.chaos.records import (
    DEAD,
    DONE,
    KILLED,
    LEFT,
    MARKED,
    REFUSED,
    RETRY,
    SLAVE_STOPPED,
    STORED,
    UNKNOWN,
    DeadLetter,
    Decided,
    Fault,
    Gone,
    Got,
    Joined,
    Kept,
    Position,
    Sending,
    Sent,
    Stalled,
    Window,
    line_of,
    records_of,
)
from qmq.deploy.control import Copy
from qmq.log.fold import State
from qmq.log.group import Consumer, Group, UnackedRange
from qmq.log.requeued import Requeued, RequeuedRange


def sent(id, sequence, *, subject="s", outcome=STORED, broker_group="g1", key="", tags=(), sender="p", at=1.0):
    yield Sending(at, sender, subject, id, key, list(tags), len(id))
    yield Sent(at + 0.1, id, outcome, broker_group if outcome == STORED else "", sequence)


NUMBERS = count()


def given(
    id,
    sequence,
    at,
    *,
    consumer="c1",
    times=1,
    decision=DONE,
    kept=0.2,
    subject="s",
    group="g",
    broker_group="g1",
    content=None,
):
    """Return records of a delivery; without a decision if `decision` is None, unconfirmed if `kept` is None."""
    number, content = next(NUMBERS), len(id) if content is None else content
    records = [Got(at, consumer, number, subject, group, broker_group, sequence, number, times, id, content)]
    if decision is not None:
        records.append(Decided(at + 0.1, consumer, number, decision))
        if kept is not None:
            records.append(Kept(at + kept, consumer, [number]))
    return records


def joined(consumer="c1", *, subject="s", group="g", concurrency=1, tags=()):
    return Joined(0.0, consumer, subject, group, concurrency, list(tags))


def kinds(*parts):
    """Return the rules of the findings in records and lists of records, read through a file in this order."""
    records = []
    for part in parts:
        records += [part] if hasattr(part, "_fields") else part
    history = History()
    history.read(records_of([line_of(record) for record in records]))
    return {finding.rule for finding in check(history)}


TWO = [*sent("a", 0), *sent("bb", 1)]


def test_sound_history_has_no_findings():
    assert kinds(TWO, joined(), given("a", 0, 2), given("bb", 1, 3)) == set()


def test_messages_of_unknown_outcome_may_be_missing():
    unknown = [Sending(1.0, "p", "s", "bb", "", [], 2)]
    assert kinds(sent("a", 0), unknown, joined(), given("a", 0, 2)) == set()
    assert kinds(sent("a", 0), unknown, joined(), given("a", 0, 2), given("bb", 1, 3)) == set()


# Lost.


@pytest.mark.parametrize(
    "handed",
    [
        pytest.param([], id="given to nobody"),
        pytest.param(given("bb", 1, 3, decision=None), id="begun and never ended"),
        pytest.param(given("bb", 1, 3, decision=RETRY), id="nacked and never seen again"),
        pytest.param(given("bb", 1, 3, decision=DEAD), id="given up without a dead letter"),
        pytest.param(
            [*given("bb", 1, 3, kept=None), Gone(3.5, "c1", KILLED), *given("bb", 1, 4, times=2, decision=DEAD)],
            id="done, then given up without a dead letter",
        ),
        pytest.param(given("bb", 1, 3, group="other"), id="handled in another group alone"),
    ],
)
def test_stored_message_that_no_member_handled_is_lost(handed):
    assert kinds(TWO, joined(), joined(group="other"), given("a", 0, 2), given("a", 0, 2, group="other"), handed) == {
        "lost"
    }


def test_message_without_a_consumer_is_lost():
    assert kinds(TWO) == {"lost"}


def test_dead_letter_is_not_lost():
    dead = DeadLetter(9.0, "s", "g", "g1", 1, "bb", 1)
    assert kinds(TWO, joined(), given("a", 0, 2), given("bb", 1, 3, decision=DEAD), dead) == set()
    assert kinds(TWO, joined(), given("a", 0, 2), dead) == set(), "its limit was reached by those who vanished with it"


def test_consumer_with_tags_gets_exactly_these():
    red, blue = sent("a", 0, tags=["red"]), list(sent("bb", 1, tags=["blue"]))
    history = [*red, *blue]
    assert kinds(history, joined(tags=["red"]), given("a", 0, 2)) == set()
    assert kinds(history, joined(tags=["blue"])) == {"lost"}
    assert kinds(history, joined(tags=["red"]), given("a", 0, 2), given("bb", 1, 3)) == {"unexpected"}


# Duplicated.


def again(*between, decision=DONE, kept=0.2, at=3.0, consumer="c2"):
    """Return the findings of message "a", delivered at 2 s and again."""
    first = given("a", 0, 2, decision=decision, kept=kept)
    return kinds(sent("a", 0), joined(), joined("c2"), first, between, given("a", 0, at, times=2, consumer=consumer))


def test_message_is_not_redelivered_after_its_confirmed_ack():
    assert again() == {"duplicated"}
    causes = [Gone(2.5, "c1", KILLED), Stalled(2.1, 2.9, "c1"), Fault(2.0, 3.0, "kill master", "g1", False)]
    assert again(*causes) == {"duplicated"}, "nothing of that excuses it"


def test_lost_ack_is_excused_by_a_lost_copy():
    assert again(Fault(2.0, 3.0, "lose the master's disk", "g1", True)) == set()
    assert again(Fault(2.0, 3.0, "lose the master's disk", "g2", True)) == {"duplicated"}
    assert again(Fault(2.3, 3.0, "lose the master's disk", "g1", True)) == {"duplicated"}, "both had it by then"


def test_redelivery_of_an_unconfirmed_message_needs_a_cause():
    assert again(kept=None) == {"duplicated"}
    assert again(decision=None) == {"duplicated"}
    assert again(decision=RETRY) == set()
    assert again(decision=RETRY, kept=None) == set()


@pytest.mark.parametrize(
    "cause",
    [
        Gone(2.5, "c1", KILLED),
        Stalled(2.1, 2.9, "c1"),
        Fault(2.5, 3.0, "kill master", "g1", False),
        Fault(2.5, 3.0, "kill metaserver", "", False),
    ],
)
def test_fault_of_consumer_or_broker_causes_a_redelivery(cause):
    assert again(cause, kept=None) == set()
    assert again(cause, decision=None) == set()


@pytest.mark.parametrize(
    "no_cause",
    [
        Gone(3.5, "c1", KILLED),
        Gone(2.5, "c2", KILLED),
        Stalled(2.1, 2.9, "c2"),
        Stalled(1.0 - CAUSE_S, 1.9 - CAUSE_S, "c1"),
        Fault(2.5, 3.0, "kill master", "g2", False),
        Fault(3.1, 3.2, "kill master", "g1", False),
    ],
)
def test_later_faults_and_faults_of_others_excuse_nothing(no_cause):
    assert again(no_cause, kept=None) == {"duplicated"}


def test_consumer_is_gone_from_its_first_leave():
    assert again(Gone(3.5, "c1", LEFT), Gone(2.5, "c1", LEFT), kept=None) == set()
    assert again(Gone(3.5, "c1", LEFT), kept=None) == {"duplicated"}


def test_second_dead_letter_is_a_duplicate():
    dead = DeadLetter(9.0, "s", "g", "g1", 0, "a", 1)
    assert kinds(sent("a", 0), joined(), given("a", 0, 2, decision=DEAD), dead, dead) == {"duplicated"}
    assert kinds(sent("a", 0), joined(), given("a", 0, 2), dead) == {"duplicated"}


# Unexpected.


@pytest.mark.parametrize(
    "handed",
    [
        pytest.param(given("x", 1, 3), id="no producer sent it"),
        pytest.param(given("bb", 1, 3, content=7), id="other content"),
        pytest.param(given("refused", 1, 3), id="said to be not stored"),
        pytest.param([*given("twice", 1, 3), *given("twice", 2, 4)], id="stored twice"),
        pytest.param(given("elsewhere", 1, 3), id="not where its receipt says"),
        pytest.param(given("other", 1, 3), id="of another subject"),
    ],
)
def test_message_that_was_not_sent_is_unexpected(handed):
    unsure = [Sending(1.0, "p", "s", id, "", [], len(id)) for id in ("bb", "twice")]
    refused = sent("refused", -1, outcome=REFUSED)
    elsewhere = [*sent("elsewhere", 0, broker_group="g2"), *given("elsewhere", 0, 2, broker_group="g2")]
    other = [Sending(1.0, "p", "t", "other", "", [], 5)]
    history = [*sent("a", 0), *unsure, *refused, joined(concurrency=2), *elsewhere, *other, *given("a", 0, 2)]
    assert kinds(history) == set()
    assert kinds(history, handed) == {"unexpected"}


def test_dead_letter_of_another_message_is_unexpected():
    dead = DeadLetter(9.0, "s", "g", "g1", 0, "x", 1)
    assert kinds(sent("a", 0), joined(), given("a", 0, 2, decision=DEAD), dead) == {"unexpected"}


# Reordered.


def test_serial_consumer_gets_older_messages_first():
    backwards = [*given("bb", 1, 2), *given("a", 0, 3)]
    assert kinds(TWO, joined(), backwards) == {"reordered"}
    assert kinds(TWO, joined(concurrency=2), backwards) == set()
    loss = Fault(2.5, 2.8, "lose the master's disk", "g1", True)
    assert kinds(TWO, joined(), backwards, loss) == set()
    history = [TWO, joined(), joined("c2"), backwards]
    assert kinds(*history, Gone(2.5, "c2", LEFT)) == set(), "it had not begun with that one"
    assert kinds(*history, Gone(2.5, "c2", KILLED)) == set(), "nor does a crash count what it had not begun with"
    assert kinds(*history, Gone(-60.0, "c2", LEFT), Gone(2.5, "c2", LEFT)) == set(), "it was a minute leaving"
    assert kinds(*history, Gone(-60.0, "c2", LEFT)) == {"reordered"}
    assert kinds(*history, Gone(3.5, "c2", LEFT)) == {"reordered"}
    assert kinds(*history, joined("c3", subject="t"), Gone(2.5, "c3", LEFT)) == {"reordered"}
    retried = [*given("a", 0, 2, decision=RETRY), *given("bb", 1, 3), *given("a", 0, 4, times=2)]
    assert kinds(TWO, joined(), retried) == set(), "a retry comes later"


KEYED = [*sent("a", 0, key="k"), *sent("bb", 1, key="k"), *sent("ccc", 2, key="other")]
THIRD = given("ccc", 2, 2)


def test_message_of_a_key_waits_for_its_predecessors():
    many = joined(concurrency=8)
    assert kinds(KEYED, many, THIRD, given("a", 0, 2), given("bb", 1, 2.2)) == set()
    assert kinds(KEYED, many, THIRD, given("a", 0, 2), given("bb", 1, 2.05)) == {"reordered"}, "it was not done"
    retried = [*given("a", 0, 2, decision=RETRY), *given("a", 0, 4, times=2)]
    assert kinds(KEYED, many, THIRD, retried, given("bb", 1, 3)) == {"reordered"}, "a retry was in front of it"
    assert kinds(KEYED, many, THIRD, retried, given("bb", 1, 5)) == set()


def test_late_handler_of_a_stall_is_not_reordering():
    stale = [Stalled(1.0, 7.9, "c1"), *given("a", 0, 8, kept=None), *given("a", 0, 4, times=2, consumer="c2")]
    assert kinds(KEYED, joined(), joined("c2"), THIRD, stale, given("bb", 1, 5)) == set()
    two = joined(), joined("c2")
    not_begun = [*given("a", 0, 8, kept=None), *given("a", 0, 4, consumer="c2")]
    assert kinds(KEYED, *two, THIRD, Stalled(1.0, 7.9, "c1"), not_begun, given("bb", 1, 5)) == set()
    assert kinds(KEYED, *two, THIRD, not_begun, given("bb", 1, 5)) == {"times do not grow"}, "it did not stall"


def test_key_continues_after_a_dead_letter():
    dead = DeadLetter(9.0, "s", "g", "g1", 0, "a", 1)
    given_up = [*given("a", 0, 2, decision=DEAD), dead]
    assert kinds(KEYED, joined(), THIRD, given_up, given("bb", 1, 3)) == set()
    assert kinds(KEYED, joined(), THIRD, given_up, given("bb", 1, 2.05)) == {"reordered"}
    vanished = [*given("a", 0, 2, decision=None), Gone(2.5, "c1", KILLED), dead]
    assert kinds(KEYED, joined(), joined("c2"), THIRD, vanished, given("bb", 1, 3, consumer="c2")) == set()


def test_messages_of_a_key_are_stored_in_order():
    handed = [*given("a", 1, 4), *given("bb", 0, 3)]
    assert kinds(sent("a", 1, key="k"), sent("bb", 0, key="k"), joined(), handed) == {"reordered"}
    elsewhere = [*given("a", 0, 2), *given("bb", 0, 3, broker_group="g2")]
    split = [*sent("a", 0, key="k"), *sent("bb", 0, key="k", broker_group="g2")]
    assert kinds(split, joined(), elsewhere) == {"reordered"}


# Positions, sequences, times.


def test_acked_position_never_goes_back():
    def position(at, acked_end, begins=False):
        return Position(at, "c1", "s", "g", "g1", acked_end, begins)

    assert kinds(joined(), position(1, 5), position(2, 5), position(3, 6)) == set()
    assert kinds(joined(), position(1, 5), position(2, 4)) == {"offset went back"}
    assert kinds(joined(), position(1, 5), position(2, 0, begins=True)) == set(), "it said that it holds nothing"
    loss = Fault(1.0, 1.5, "lose the master's disk", "g1", True)
    assert kinds(joined(), loss, position(1, 5), position(2, 4)) == set()


def test_skipped_sequence_is_reported():
    assert kinds(sent("a", 0), sent("bb", 2), joined(), given("a", 0, 2), given("bb", 2, 3)) == {"poll skipped"}


def test_delivery_attempts_of_a_message_grow():
    nacked = given("a", 0, 2, times=2, decision=RETRY)
    assert kinds(sent("a", 0), joined(), nacked, given("a", 0, 3, times=3)) == set()
    assert kinds(sent("a", 0), joined(), nacked, given("a", 0, 3, times=2)) == {"times do not grow"}
    assert kinds(sent("a", 0), joined(), nacked, given("a", 0, 3, times=1, kept=None)) == {"times do not grow"}
    loss = Fault(2.0, 2.5, "lose the master's disk", "g1", True)
    assert kinds(sent("a", 0), joined(), nacked, loss, given("a", 0, 3, times=2)) == set()


# Records.


def test_torn_file_is_read_up_to_the_tear():
    line = line_of(joined())
    assert list(records_of([line, line[:-5]])) == [joined()]
    assert list(records_of([line, line[:-1]])) == [joined()], "a whole line ends with its newline"


def test_findings_show_their_evidence_and_are_not_endless():
    history = History()
    history.read(record for n in range(50) for record in sent(f"m{n}", n))
    history.read([joined()])
    findings = check(history)
    assert len(findings) == 6 and findings[-1].text == "and 45 more"
    assert "for g: Sending(at=1.0, sender='p', subject='s', id='m0'" in findings[0].text


# Logs.


class Frames(Copy):
    """Copy of messages without frames; the messages stand for its end and chain."""

    @property
    def end(self):
        return len(self.messages)

    @property
    def chain(self):
        return hash(tuple(self.messages))


def copy(*ids, group=None):
    messages = [("s", sequence, id) for sequence, id in ids]
    groups = {("s", "g"): group or Group(len(messages))}
    return Frames(0, messages=messages, state=State(next_sequence={"s": len(messages)}, groups=groups))


SOUND = [*TWO, *sent("ccc", -1, outcome=REFUSED), *sent("dddd", -1, outcome=UNKNOWN), joined()]
SOUND += [*given("a", 0, 2), *given("bb", 1, 3)]
A, B, C, D = (0, "a"), (1, "bb"), (2, "ccc"), (2, "dddd")


def log_rules(master, slave=None, more=()):
    history = History()
    history.read([*SOUND, *more])
    return {finding.rule for finding in check(history, {"g1": (master, slave or master)})}


def test_sound_logs_have_no_findings():
    assert log_rules(copy(A, B)) == set()
    assert log_rules(copy(A, B, D)) == set(), "a message of unknown outcome may be stored"


@pytest.mark.parametrize(
    ("rules", "master", "slave"),
    [
        pytest.param({"lost-copy", "copies-differ"}, [A, B], [A], id="slave lacks a message"),
        pytest.param({"lost-copy", "copies-differ"}, [A], [A, B], id="master lacks a message"),
        pytest.param({"lost-copy"}, [(0, "bb"), (1, "a")], None, id="another sequence"),
        pytest.param({"duplicate"}, [A, B, D, (3, "dddd")], None, id="twice"),
        pytest.param({"refused-stored"}, [A, B, C], None, id="refused"),
        pytest.param({"unsent"}, [A, B, (2, "x")], None, id="not sent"),
        pytest.param({"sequence"}, [A, B, (3, "dddd")], None, id="gap"),
    ],
)
def test_wrong_logs_are_named(rules, master, slave):
    assert rules <= log_rules(copy(*master), copy(*(slave or master)))


def test_sequences_follow_the_order_of_a_sender():
    assert "order" in kinds(sent("a", 1), sent("bb", 0), joined(), given("a", 1, 2), given("bb", 0, 3))


@pytest.mark.parametrize(
    ("kind", "rule"), [pytest.param(SLAVE_STOPPED, "lost-copy"), pytest.param(MARKED, "readonly-leak")]
)
def test_acknowledgement_within_a_window_is_named(kind, rule):
    assert log_rules(copy(A, B), more=[Window(0.9, 2.0, kind, "g1")]) == {rule}
    for window in (Window(0.9, 2.0, kind, "g2"), Window(1.05, 2.0, kind, "g1"), Window(0.9, 1.05, kind, "g1")):
        assert log_rules(copy(A, B), more=[window]) == set()


@pytest.mark.parametrize(
    "group",
    [
        Group(1),
        Group(2, requeued=Requeued([RequeuedRange(0, 1, 1, 0)])),
        Group(2, consumers={"c": Consumer(unacked=[UnackedRange(0, 0, 1, 1)])}),
    ],
)
def test_unsettled_messages_at_the_end_are_named(group):
    assert log_rules(copy(A, B, group=group)) == {"not-drained"}
