"""Shell. Control port of a broker: consumers and messages for operators, and refusals."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import grpc
import pytest

from qmq.broker import browse, control
from qmq.broker.control import Control
from qmq.dead_letters import REDRIVER
from qmq.errors import DiskFailed
from qmq.proto import qmq_pb2 as pb
from qmq.rights import Caller, Scope, TokenRole
from qmq.server.producing import SUBJECTS_COUNTED
from qmq.subjects import dead_letter_subject, retry_subject
from qmq.types import Role
from tests.unit.broker.limited import hours_pass
from tests.unit.broker.world import SETTINGS, Broker, Client, Group

PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
COUNT = 12


class Refused(Exception):
    def __init__(self, status: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.status = status


class Context:
    async def abort(self, status: grpc.StatusCode, text: str) -> None:
        raise Refused(status, text)


class Port:
    """Control port of one broker. After a change, `then` happens."""

    def __init__(self, broker: Broker, then=lambda: None, subjects: tuple[str, ...] = ()) -> None:
        self.ended: list[Exception] = []
        self.caller = Caller("t", TokenRole.CLIENT, Scope(subjects))
        self.service = SimpleNamespace(
            acceptors={}, node=broker.node, guarded=lambda call: (call(), then())[0], fail=self.ended.append
        )

    def ask(self, name: str, request):
        async def run():
            return await getattr(Control(self.service, SETTINGS, None), name)(request, Context())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(control, "caller", lambda: self.caller)
            return asyncio.run(run())

    def refused(self, name: str, request) -> grpc.StatusCode:
        with pytest.raises(Refused) as error:
            self.ask(name, request)
        return error.value.status


def stored(*, size: int = 900, **changes) -> Group:
    """A group with messages in several segments, one each second."""
    group = Group.made(**changes).start()
    client = group.client()
    for number in range(COUNT):
        client.store(f"m{number}", size=size)
        group.a.wait(1_000)
    assert len(group.a.log.bases) > 3
    return group


def stored_ms(group: Group, sequence: int) -> int:
    (ref,) = group.a.log.frames("s", sequence, 1)
    return group.a.log.timestamp_at(ref.offset)


def drop_old_segments(group: Group) -> int:
    """Return the first sequence that is left."""
    group.a.drop_segments(left=1)
    return group.a.log.frames("s", 0, 1)[0].begin


def damage(group: Group, sequence: int) -> None:
    """Flip a bit of a message's header."""
    (ref,) = group.a.log.frames("s", sequence, 1)
    group.a.flip(ref.offset + 20)


# Browse.


def look(group: Group, **fields) -> pb.BrowseAnswer:
    return Port(group.a).ask("Browse", pb.BrowseRequest(subject="s", **fields))


def sequences(answer: pb.BrowseAnswer) -> list[int]:
    assert [message.id for message in answer.messages] == [f"m{message.sequence}" for message in answer.messages]
    return [message.sequence for message in answer.messages]


@pytest.mark.parametrize("tail_bytes", [0, 1 << 20], ids=["from disk", "from memory"])
def test_browse_shows_messages_and_bounds(tail_bytes):
    group = stored(tail_bytes=tail_bytes)
    answer = look(group)
    assert sequences(answer) == list(range(COUNT))
    assert (answer.begin, answer.end, answer.first_sequence, answer.end_sequence) == (COUNT, COUNT, 0, COUNT)
    assert [message.stored_ms for message in answer.messages] == [stored_ms(group, at) for at in range(COUNT)]
    first = drop_old_segments(group)
    assert first > 0
    later = look(group)
    assert sequences(later) == list(range(first, COUNT)) and later.first_sequence == first


@pytest.mark.parametrize("tail_bytes", [0, 1 << 20], ids=["from disk", "from memory"])
def test_bounds_of_sequences_and_of_time_hold_together(tail_bytes):
    group = stored(tail_bytes=tail_bytes)
    since, until = stored_ms(group, 4), stored_ms(group, 9)
    assert sequences(look(group, begin=2, end=5)) == [2, 3, 4]
    assert sequences(look(group, since_ms=since, until_ms=until)) == [4, 5, 6, 7, 8]
    assert sequences(look(group, begin=6, since_ms=since, end=8, until_ms=until)) == [6, 7]
    assert sequences(look(group, begin=2, since_ms=since, end=11, until_ms=until)) == [4, 5, 6, 7, 8]
    assert sequences(look(group, messages_max=2, newest_first=True)) == [11, 10]


def test_browse_shows_only_matches():
    group = stored()
    assert [message.sequence for message in look(group, id="m7").messages] == [7]
    assert look(group, tags=["pay"]).messages == [] and look(group, properties={"x": "z"}).messages == []
    assert len(look(group, properties={"x": "y" * 900}).messages) == COUNT


def test_properties_are_shown_on_request():
    group = stored()
    (with_them,) = look(group, begin=1, end=2, with_properties=True).messages
    assert [(property.name, property.value) for property in with_them.properties] == [("x", "y" * 900)]
    (without,) = look(group, begin=1, end=2).messages
    assert not without.properties and without.stored_bytes == with_them.stored_bytes > 900


def test_slow_browse_returns_its_position(monkeypatch):
    monkeypatch.setattr(control, "CALL_S", -1.0)
    answer = look(stored())
    assert (list(answer.messages), answer.begin, answer.end) == ([], 0, COUNT)


@pytest.mark.parametrize(("at_once", "pauses"), [(COUNT, 1), (COUNT + 1, 0), (5, 2)])
def test_writing_an_answer_yields(monkeypatch, at_once, pauses):
    slept = []
    monkeypatch.setattr(control, "MESSAGES_AT_ONCE", at_once)
    monkeypatch.setattr(control.time, "sleep", slept.append)
    look(stored())
    assert slept == [control.PAUSE_S] * pauses


def test_searching_messages_yields(monkeypatch):
    slept = []
    monkeypatch.setattr(browse, "PAUSE_BYTES", 1)
    monkeypatch.setattr(control.time, "sleep", slept.append)
    look(stored())
    assert len(slept) == 2 * COUNT  # each frame is searched, and each message


def test_messages_deleted_during_a_browse_are_skipped(monkeypatch):
    group, step, first = stored(tail_bytes=0), control._step, []

    def late(*args):
        first.append(drop_old_segments(group))
        step(*args)

    monkeypatch.setattr(control, "_step", late)
    assert sequences(look(group)) == list(range(first[0], COUNT))


def test_frame_deleted_during_a_time_search_is_older(monkeypatch):
    group = stored(tail_bytes=0)
    timestamp_at, until_ms, first = group.a.log.timestamp_at, stored_ms(group, COUNT - 1), []

    def late(offset):
        first.append(drop_old_segments(group))
        return timestamp_at(offset)

    monkeypatch.setattr(group.a.log, "timestamp_at", late)
    assert sequences(look(group, until_ms=until_ms)) == list(range(first[0], COUNT - 1))


@pytest.mark.parametrize("fields", [{}, {"since_ms": 1}], ids=["where it is read", "where a time is looked for"])
@pytest.mark.parametrize("is_oldest", [False, True])
def test_damage_is_repaired_and_not_passed_over(fields, is_oldest):
    group = stored(tail_bytes=0)
    damage(group, drop_old_segments(group) if is_oldest else COUNT // 2)
    port = Port(group.a)
    assert port.refused("Browse", pb.BrowseRequest(subject="s", **fields)) is PRECONDITION
    assert "corrupt" in group.a.node.readonly_reasons and not port.ended


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        pytest.param(pb.BrowseRequest(subject="other"), grpc.StatusCode.PERMISSION_DENIED, id="of another subject"),
        pytest.param(
            pb.BrowseRequest(subject="s", messages_max=5_000), grpc.StatusCode.INVALID_ARGUMENT, id="too many"
        ),
    ],
)
def test_forbidden_browse_is_refused(request_, status):
    assert Port(stored().a, subjects=("s",)).refused("Browse", request_) is status


def test_slave_refuses_browse_and_move():
    group = stored()
    for name, request in (
        ("Browse", pb.BrowseRequest(subject="s")),
        ("Consumers", pb.ConsumersRequest()),
        ("ResetOffset", pb.ResetOffsetRequest(subject="s", group="g", to="latest")),
    ):
        assert Port(group.b).refused(name, request) is PRECONDITION


def test_disk_failure_during_a_browse_ends_the_process(monkeypatch):
    group = stored(tail_bytes=0)

    def fails(*args):
        raise DiskFailed("it is gone")

    monkeypatch.setattr(control, "_step", fails)
    port = Port(group.a)
    port.ask("Browse", pb.BrowseRequest(subject="s"))
    assert [str(error) for error in port.ended] == ["it is gone"]


# Consumers.


def consumed(group: Group, name: str, count: int, *, subject: str = "s") -> Client:
    """Let a consumer of the group `name` ack this number of messages."""
    client = group.subscribed("c", group=name, subject=subject)
    if count:
        client.take(most=count)
        pull_sequence = client.first
        client.done(client.ack(pull_sequence, pull_sequence + count))
    return client


def consumers(of: Group, **fields) -> list[pb.GroupProgress]:
    return list(Port(of.a).ask("Consumers", pb.ConsumersRequest(**fields)).groups)


def test_groups_are_listed_with_consumers_and_lag():
    group = stored(tail_bytes=0)
    consumed(group, "half", 5)
    client = consumed(group, "none", 0)
    client.take(most=3)
    first = client.first
    client.nack(first, first + 1, delay_ms=60_000)
    client.lost()
    half, none = consumers(group)
    assert (half.subject, half.group, half.lag, half.position, half.returned) == ("s", "half", 7, 5, 0)
    assert (half.first_sequence, half.next_sequence, half.dead_letters) == (0, COUNT, 0)
    assert [
        (consumer.consumer, consumer.connected, consumer.unacked, consumer.peer) for consumer in half.consumers
    ] == [("c", True, 0, "c")]
    assert half.oldest_ms == stored_ms(group, 5)
    assert (none.group, none.lag, none.position, none.returned) == ("none", COUNT, 3, 1)
    assert [
        (consumer.consumer, consumer.connected, consumer.unacked, consumer.peer) for consumer in none.consumers
    ] == [("c", False, 2, "")]
    assert none.oldest_ms == stored_ms(group, 0)
    assert [consumer.group for consumer in consumers(group, group="none")] == ["none"] and not consumers(
        group, subject="t"
    )


def test_largest_lags_are_listed_first():
    group = stored()
    for name, count in (("a", COUNT), ("b", 5), ("c", 11), ("d", 0)):
        consumed(group, name, count)
    assert [consumer.group for consumer in consumers(group, behind_max=2)] == ["d", "b"]
    assert [consumer.group for consumer in consumers(group, behind_max=9)] == ["d", "b", "c"]
    everybody = consumers(group)
    assert [row.group for row in everybody] == ["a", "b", "c", "d"] and everybody[0].oldest_ms == 0


def with_dead_letters() -> Group:
    """A group `a` with two dead letters, one redriven, and nothing else to do; `b` and `c` with a backlog."""
    group = stored()
    client = consumed(group, "a", 0)
    client.take(most=COUNT)
    client.nack(client.first, client.first + 2, dead=True)
    client.done(client.ack(client.first + 2, client.first + COUNT))
    consumed(group, REDRIVER, 1, subject=dead_letter_subject("s", "a"))
    consumed(group, "b", 3)
    consumed(group, "c", 5).take(most=2)
    return group


def test_dead_letters_are_listed_beside_large_backlogs():
    group = with_dead_letters()
    shown = consumers(group, behind_max=1)
    assert [(row.group, row.lag, row.dead_letters) for row in shown] == [("b", COUNT - 3, 0), ("a", 0, 1)]
    names = [row.group for row in consumers(group, behind_max=9)]
    assert names == ["b", "c", "a"], "without the redrive: it would count the letter again"
    assert REDRIVER in [row.group for row in consumers(group)]


def test_sums_count_groups_that_are_not_listed():
    request = pb.ConsumersRequest(behind_max=1)
    sums = Port(with_dead_letters().a).ask("Consumers", request).sums
    assert (sums.groups, sums.lag, sums.unacked, sums.dead_letters) == (3, 2 * COUNT - 8, 2, 1)


def test_groups_are_counted_without_an_index(monkeypatch):
    """Over 30 segments, 100,000 groups took 8 s of a master's time."""
    group, frames = stored(), []
    for number in range(20):
        consumed(group, f"g{number}", number % 9)
    look = group.a.log.frames
    monkeypatch.setattr(group.a.log, "frames", lambda *at: frames.append(at) or look(*at))
    assert len(consumers(group, behind_max=2)) == 2 and len(frames) <= 2 * 3


def test_group_has_its_consumer_hold_a_message():
    group = stored()
    client = consumed(group, "a", 0)
    client.take(most=2)
    group.a.wait(1_000)
    group.a.wait(20_000)
    (row,) = consumers(group, group="a")
    assert row.first_unacked_ms >= 20_000
    client.done(client.ack(client.first, client.first + 1))
    group.a.wait(1_000)
    assert consumers(group, group="a")[0].first_unacked_ms <= 1_000


def test_size_of_a_subject_is_that_of_its_frames():
    group = stored(tail_bytes=0)

    def size(**fields) -> int:
        return Port(group.a).ask("Consumers", pb.ConsumersRequest(**fields)).subject_bytes

    lengths = [ref.length for ref in group.a.log.frames("s", 0, COUNT)]
    assert size(subject="s") == sum(lengths) > 900 * COUNT
    assert size(subject="t") == size() == size(subject="s", behind_max=5) == 0
    group.a.log.state.kept.start = group.a.log.bases[1]
    left = len(group.a.log.frames("s", 0, COUNT))
    assert size(subject="s") == sum(lengths[-left:]) < sum(lengths), "without what retention decided to delete"
    drop_old_segments(group)
    assert size(subject="s") == sum(ref.length for ref in group.a.log.frames("s", 0, COUNT))


def test_producers_are_listed_with_their_messages():
    group = stored()
    port, (shop, quiet) = Port(group.a), (group.client("shop"), group.client("quiet"))
    shop.store("x1", "x2")
    shop.store("x3", subject="t")
    port.service.acceptors = [SimpleNamespace(app=link.peer, connection=link) for link in (shop.link, quiet.link)]
    (row,) = port.ask("Consumers", pb.ConsumersRequest(subject="s")).producers
    assert (row.app, row.peer, row.messages) == ("shop", shop.link.peer, 2)
    for number in range(SUBJECTS_COUNTED):
        shop.store("y", subject=f"t{number}")
    assert len(shop.link.produced) == SUBJECTS_COUNTED and "s" not in shop.link.produced


def test_listing_many_groups_yields(monkeypatch):
    group, pauses, sleep = stored(), [], asyncio.sleep
    for name in "abcde":
        consumed(group, name, 0)

    async def pause(seconds):
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(control, "GROUPS_AT_A_TIME", 2)
    monkeypatch.setattr(control, "COUNTED_AT_A_TIME", 3)
    monkeypatch.setattr(control.asyncio, "sleep", pause)
    assert len(consumers(group)) == 5 and pauses == [0, 0]
    assert len(consumers(group, behind_max=1)) == 1 and pauses == [0, 0, 0]


def test_group_without_its_oldest_message_has_no_age(monkeypatch):
    group = stored(tail_bytes=0)
    consumed(group, "a", 0)
    timestamp_at = group.a.log.timestamp_at
    monkeypatch.setattr(group.a.log, "timestamp_at", lambda at: (drop_old_segments(group), timestamp_at(at))[1])
    (shown,) = consumers(group)
    assert (shown.group, shown.oldest_ms) == ("a", 0)


@pytest.mark.parametrize("is_oldest", [False, True])
def test_damage_at_a_groups_oldest_message_is_repaired(is_oldest):
    group = stored(tail_bytes=0)
    consumed(group, "a", 0)
    damage(group, drop_old_segments(group) if is_oldest else 0)
    assert Port(group.a).refused("Consumers", pb.ConsumersRequest()) is PRECONDITION
    assert "corrupt" in group.a.node.readonly_reasons


def days_pass(group: Group, days: int = 2) -> None:
    """Let days pass in which connected consumers keep their leases."""
    for _ in range(days):
        hours_pass(group, 24.1)


def unused(group: Group) -> dict[str, int]:
    """Return the days for which groups of the subject s are unused."""
    now_ms = group.a.host.now_ms()
    found = consumers(group, unused_before_ms=now_ms)
    return {row.group: (now_ms - row.unused_since_ms) // 86_400_000 for row in found}


def test_groups_without_consumers_are_listed_as_unused():
    group = stored()
    consumed(group, "left", 1).leave()
    consumed(group, "idle", 0)
    group.wait(1_000)
    assert unused(group) == {}, "the mastership is too young"
    days_pass(group)
    assert unused(group) == {"left": 2}
    since_ms = group.a.host.now_ms() - 3 * 86_400_000
    assert consumers(group, unused_before_ms=since_ms) == []
    assert {row.group: row.unused_since_ms > 0 for row in consumers(group)} == {"left": True, "idle": False}


@pytest.mark.parametrize("end", ["leave", "lost", "promotion"])
def test_group_of_an_idle_consumer_is_unused_since_its_end(end):
    """It got no message for days, so only its record in the log shows its departure, also after a promotion."""
    group = stored()
    client = consumed(group, "idle", 0)
    days_pass(group)
    assert group.b.log.state.groups["s", "idle"].consumers.keys() == {"c"}
    if end == "leave":
        client.done(client.leave())
    elif end == "lost":
        client.lost()
    else:
        group.a.assign(Role.SLAVE, 2)
        group.b.assign(Role.MASTER, 2)
        group.a, group.b = group.b, group.a
        group.agree()
    group.wait(1_000, times=40)  # its lease ends
    hours_pass(group, 1.1)
    assert unused(group) == {"idle": 0}


# ResetOffset.


def move(**fields) -> pb.ResetOffsetRequest:
    return pb.ResetOffsetRequest(subject="s", group="g", **({"to": "sequence", "value": 3} | fields))


@pytest.mark.parametrize("dry_run", [False, True])
def test_dry_run_of_a_move_reports_its_effect(dry_run):
    group = stored()
    consumed(group, "g", 5)
    done = Port(group.a, then=lambda: None if dry_run else group.settle()).ask("ResetOffset", move(dry_run=dry_run))
    assert (done.before, done.after, done.skipped, done.repeated) == (5, 3, 0, 2)
    for broker in (group.a, group.b):
        assert broker.log.state.groups["s", "g"].position == (5 if dry_run else 3)


REMOVAL = {"to": "removed", "value": 0}


MAILBOX = retry_subject("s", "g")


def removed(group: Group) -> pb.ResetOffsetAnswer:
    return Port(group.a, then=group.settle).ask("ResetOffset", move(**REMOVAL))


def test_removed_group_is_gone_from_both_copies():
    """A group of the same name begins anew, and a repeat changes nothing."""
    group = stored()
    for subject in ("s", MAILBOX):
        consumed(group, "g", 0, subject=subject).leave()
    group.settle()
    done = removed(group)
    assert (done.before, done.skipped) == (0, done.after) and done.skipped > 0
    for broker in (group.a, group.b):
        assert not {("s", "g"), (MAILBOX, "g")} & broker.log.state.groups.keys()
    end = group.a.log.end
    assert removed(group).skipped == 0
    assert group.a.log.end == end
    group.a.crash()
    assert ("s", "g") not in group.a.log.state.groups


@pytest.mark.parametrize("had_position", [True, False])
def test_next_group_gets_no_old_mailbox_messages(had_position):
    """Those that were handled, those that waited, and those that no consumer had got; later ones it gets."""
    group = stored()
    group.client().store("handled", "waiting", subject=MAILBOX)
    consumed(group, "g", 0).leave()
    if had_position:
        consumed(group, "g", 1, subject=MAILBOX).leave()
    group.settle()
    removed(group)
    end = group.a.log.end
    removed(group)
    assert group.a.log.end == end, "a repeat changes nothing"
    group.client().store("redriven", subject=MAILBOX)
    for broker in (group.a, group.b):
        assert broker.log.state.groups[MAILBOX, "g"].unconsumed(3) == [(2, 3)]
    assert group.subscribed("c2", subject=MAILBOX).take() == ["redriven"]


def test_removed_groups_empty_mailbox_is_forgotten():
    """Once retention has deleted its messages: an own position would stay for ever. That of a living group stays."""
    group = stored()
    group.client().store("old", subject=MAILBOX)
    group.client().store("old", subject=retry_subject("s", "other"))
    consumed(group, "g", 0).leave()
    consumed(group, "other", 0).leave()
    consumed(group, "other", 1, subject=retry_subject("s", "other")).leave()
    group.settle()
    removed(group)
    known = group.a.log.state.groups
    hours_pass(group, 0.02)
    assert (MAILBOX, "g") in known, "its message is kept"
    group.client().store(*"abcdefgh", size=900)
    drop_old_segments(group)
    group.subscribed("c1", subject=MAILBOX)
    hours_pass(group, 0.02)
    assert (MAILBOX, "g") in known, "a new consumer waits there"
    group.a.master._delivery.consumption.move(MAILBOX, "g")
    hours_pass(group, 0.02)
    assert known.keys() == {("s", "other"), (retry_subject("s", "other"), "other")}


@pytest.mark.parametrize("subject", ["s", retry_subject("s", "g")])
def test_group_with_consumers_is_not_removed(subject):
    """A subscription of a forgotten mailbox ended the master at the next message."""
    group = stored()
    consumed(group, "g", 5).leave()
    group.settle()
    consumed(group, "g", 0, subject=subject)
    port = Port(group.a)
    assert port.refused("ResetOffset", move(**REMOVAL)) is PRECONDITION
    assert ("s", "g") in group.a.log.state.groups


def test_late_ack_misses_a_new_groups_messages():
    """The consumer stood still; its group was removed, and another process began it anew under the same id."""
    group = stored()
    old = group.subscribed("c", group="g")
    old.take(most=3)
    first = old.first
    old.lost()
    group.wait(1_000, times=40)  # its lease ends
    Port(group.a, then=group.settle).ask("ResetOffset", move(**REMOVAL))
    new = group.subscribed("c", group="g", start="latest", is_new=True)
    new.store("n0", "n1", "n2")
    assert new.take(most=3) == ["n0", "n1", "n2"] and new.first == first + 3
    late = group.client("late")
    late.ack(first, first + 3, late.join("c", group="g", held_end=first + 3))
    group.settle()
    assert (COUNT, COUNT + 3) in group.progress.unconsumed(COUNT + 3)


def test_unknown_group_is_not_moved():
    assert Port(stored().a).refused("ResetOffset", move()) is PRECONDITION


def test_move_fails_if_the_slave_does_not_confirm(monkeypatch):
    monkeypatch.setattr(control, "SAFE_S", 0)
    group = stored()
    consumed(group, "g", 5)
    assert Port(group.a).refused("ResetOffset", move()) is grpc.StatusCode.DEADLINE_EXCEEDED
    group.settle()  # an answer after the call's end is harmless
    assert group.b.log.state.groups["s", "g"].position == 3


def test_move_fails_if_the_master_changes():
    group = stored()
    consumed(group, "g", 5)
    port = Port(group.a, then=lambda: group.a.assign(Role.SLAVE, 2))
    assert port.refused("ResetOffset", move()) is grpc.StatusCode.UNAVAILABLE
