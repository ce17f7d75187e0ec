"""Core. Repair of a node's damaged log: frames fetched from the other copy, frames given up, frames kept."""

from __future__ import annotations

import pytest

from qmq.errors import CorruptFrame, Diverged
from qmq.log.frame import FrameKind
from qmq.log.recovery import Damage
from qmq.replication.copy_repair import Sources, _is_other_history
from qmq.replication.identity import Point
from qmq.types import Epoch, Role
from tests.unit.broker.world import Broker, Client, Group
from tests.unit.replication.copies import with_messages

COUNT = 12


def stored(**changes) -> Group:
    """Return a group with messages in several segments, none of them in memory."""
    group = with_messages(COUNT, tail_bytes=0, **changes)
    assert len(group.a.log.bases) > 3 and group.a.node.writable
    return group


def damage(broker: Broker, sequence: int) -> int:
    """Flip a bit of a message's body; return the offset of its frame."""
    (ref,) = broker.log.frames("s", sequence, 1)
    broker.flip(ref.offset + ref.length // 2)
    return ref.offset


def met(broker: Broker, sequence: int) -> int:
    """Let a reader meet a damaged message, as the scrub does; return its offset."""
    offset = damage(broker, sequence)
    with pytest.raises(CorruptFrame) as found:
        broker.log.stored.read(offset, broker.log.end, 1)
    broker.node.found_damage(found.value)
    assert broker.log.damage.begin == offset
    return offset


def unreplayed(broker: Broker, sequence: int, role: Role = Role.SLAVE) -> int:
    """Damage a message of the newest segment and restart: the log ends there until it is repaired. Return the
    offset.
    """
    offset = damage(broker, sequence)
    broker.crash()
    assert broker.log.damage is not None and broker.log.end == offset
    broker.assign(role, 1)
    assert broker.node.role is None and broker.node.readonly_reasons == ["corrupt"] and not broker.node.writable
    return offset


def first_of_newest(broker: Broker) -> int:
    """Return the sequence of the first message of the newest segment."""
    return next(ref.begin for ref in broker.log.frames("s", 0, COUNT) if ref.offset >= broker.log.bases[-1])


def set_aside(broker: Broker) -> list[str]:
    """Return the names of all files in quarantine."""
    return [name for name in broker.disk.all_names() if name.startswith("quarantine/")]


def quarantined(broker: Broker, folder: str = "") -> bool:
    return bool(broker.disk.names(f"quarantine{folder}"))


def test_whole_log_needs_no_repair():
    group = stored()
    assert group.a.node.repairs.plan(0, group.b.log.end) is None
    group.a.node.repairs.apply(0, b"what nobody asked for")
    assert group.a.node.writable


@pytest.mark.parametrize("is_master", [True, False])
def test_health_after_a_reader_met_damage(is_master):
    group = stored()
    broken, whole = (group.a, group.b) if is_master else (group.b, group.a)
    offset, role = met(broken, 1), broken.node.role
    assert broken.node.readonly_reasons == ["corrupt"]
    begin, end = broken.node.repairs.plan(whole.log.start, whole.log.flushed_end)
    assert begin == offset and broken.log.damage.end == end
    broken.node.repairs.apply(begin, whole.log.stored.read_bytes(begin, end))
    assert broken.log.damage is None and broken.node.readonly_reasons == []
    assert quarantined(broken) and group.a.node.writable and broken.node.role is role


def test_unreplayed_broker_begins_after_its_repair():
    group = stored()
    end, begin = group.b.log.end, unreplayed(group.b, first_of_newest(group.b))
    wanted = group.b.node.repairs.plan(0, group.a.log.flushed_end)
    group.b.node.repairs.apply(begin, group.a.log.stored.read_bytes(*wanted))
    assert group.b.node.slave is not None and group.b.log.end == end and group.b.node.readonly_reasons == []


@pytest.mark.parametrize("is_agreed", [True, False])
def test_damaged_segment_below_the_other_log_is_dropped(is_agreed):
    """Segments that the copies agreed to delete are deleted. Others may be the last copy and go to quarantine."""
    group = stored()
    met(group.a, 1)
    second = group.a.log.bases[1]
    if is_agreed:
        group.a.log.state.kept.start = second
    assert group.a.node.repairs.plan(second, group.b.log.end) is None
    assert group.a.log.start == second and group.a.log.damage is None and group.a.node.writable
    aside = f"/{0:020d}-{second:020d}-damaged-and-not-at-the-other-copy-0"
    assert quarantined(group.a, aside) is not is_agreed


def test_whole_segments_below_the_other_log_stay():
    group = stored()
    met(group.a, 1)
    _, second, third = group.a.log.bases[:3]
    group.a.log.state.kept.start = third
    assert group.a.node.repairs.plan(third, group.b.log.end) is None
    assert group.a.log.start == second and group.a.log.damage is None


def test_segments_of_the_other_copy_stay():
    group = stored()
    met(group.a, 1)
    bases = list(group.a.log.bases)
    assert group.a.node.repairs.plan(bases[1] - 8, group.b.log.end) is None
    assert group.a.log.bases == bases and group.a.master.readonly.reasons == ["corrupt"]


def test_log_below_the_other_copy_is_set_aside():
    group = stored()
    begin = unreplayed(group.b, first_of_newest(group.b))
    assert group.b.node.repairs.plan(begin + 8, group.a.log.end) is None
    assert group.b.log.is_empty and group.b.node.slave is not None
    assert quarantined(group.b, f"/{0:020d}-{begin:020d}-damaged-and-dropped-by-the-other-copy-0")


def written_alone_and_damaged() -> tuple[Group, int]:
    """Return a master that cannot replay frames it wrote without its slave, and their offset."""
    group = stored()
    group.cut()
    offset = group.a.log.end
    for _ in range(2):
        group.a.master._mastership.append(FrameKind.EPOCH, "", b"{}      ")
    group.a.host.settle()
    group.a.flip(offset + 20)
    group.a.crash()
    assert group.a.log.damage.begin == offset
    group.a.assign(Role.MASTER, 1)
    assert group.a.node.role is None
    return group, offset


@pytest.mark.parametrize("has_more", [0, 8])
def test_unacknowledged_damage_beyond_the_other_copy_is_cut(has_more):
    group, offset = written_alone_and_damaged()
    assert group.a.node.repairs.plan(0, offset + has_more) is None
    assert group.a.log.damage is None and group.a.log.end == offset and quarantined(group.a)
    assert group.a.node.master is not None


def test_acknowledged_damage_is_never_cut():
    group = stored()
    begin = unreplayed(group.b, first_of_newest(group.b))
    assert group.b.node.repairs.plan(0, begin) is None  # the other copy lost them, too
    assert group.b.log.damage is not None and not quarantined(group.b) and group.b.node.role is None


def test_master_leaves_its_role_before_partial_repair():
    group = stored()
    begin = met(group.a, 1)
    group.a.log.state.high_watermark = group.a.log.end
    assert group.a.node.repairs.plan(0, begin + 8) == (begin, begin + 8)
    assert group.a.node.role is None
    group.a.assign(Role.MASTER, 1)
    assert group.a.node.master is not None, "until the next attempt"


def test_leaving_the_role_saves_the_acknowledged_point():
    group = stored()
    begin = met(group.a, 1)
    group.a.log.state.high_watermark = group.a.log.end
    group.a.node.repairs.plan(0, begin + 8)
    points = group.a.node.identity.points
    assert points.own.end == group.a.log.end and not points.is_newer_than_saved


@pytest.mark.parametrize("theirs_start, why", [(0, ""), (1 << 40, "damaged-and-dropped-by-the-other-copy")])
def test_repair_waits_for_writes_under_way(theirs_start, why):
    group = stored()
    group.cut()
    offset = group.a.log.end
    for _ in range(2):
        group.a.master._mastership.append(FrameKind.EPOCH, "", b"{}      ")
    group.a.host.settle()
    group.a.flip(offset + 20)
    with pytest.raises(CorruptFrame) as found:
        group.a.log.stored.read(offset, group.a.log.end, 1)
    group.a.node.found_damage(found.value)
    group.a.master._mastership.append(FrameKind.EPOCH, "", b"{}      ")
    assert group.a.host.turn() and not group.a.log.is_idle
    end = group.a.log.end
    for start in (0, theirs_start):
        assert group.a.node.repairs.plan(start, max(start, offset)) is None
        assert group.a.node.role is None and group.a.log.end == end and not set_aside(group.a)
    group.a.host.fsync()
    assert group.a.node.repairs.plan(theirs_start, max(theirs_start, offset)) is None
    assert group.a.log.damage is None and group.a.node.master is not None
    assert group.a.log.end == (0 if theirs_start else offset)
    assert why in "".join(set_aside(group.a)) and set_aside(group.a)


def other_history(group: Group) -> bytes:
    """Return the frames of another log of the same length."""
    other = Group.made(tail_bytes=0).start(term=7)
    client = Client(other.a)
    for number in range(COUNT):
        client.produce(f"n{number}", size=900)
        other.settle()
    assert other.a.log.bases == group.a.log.bases
    return other.a.log.stored.read_bytes(0, other.a.log.end)


def test_frames_of_another_history_repair_nothing():
    group = stored()
    begin = met(group.a, 1)
    wanted = group.a.node.repairs.plan(0, group.b.log.end)
    strange = other_history(group)
    with pytest.raises((CorruptFrame, Diverged)):
        group.a.node.repairs.apply(begin, strange[slice(*wanted)])
    assert group.a.log.damage.begin == begin and group.a.node.role is not None and not quarantined(group.a)


def test_acknowledged_unreplayed_damage_survives_another_history():
    """Both copies had the acknowledged frames, so frames of another history are wrong."""
    group = stored()
    begin = unreplayed(group.b, first_of_newest(group.b))
    damaged, strange = group.b.log.damage, other_history(group)
    group.b.node.repairs.apply(begin, strange[begin : damaged.end])
    assert group.b.log.damage is damaged and not quarantined(group.b)


def test_unreplayed_frames_of_a_lone_master_are_cut():
    group = stored()
    group.cut()
    parted = group.b.log.end
    group.b.assign(Role.MASTER, 2)
    group.b.wait(group.b.settings.slave_wait_ms)
    Client(group.b).produce("m", size=900)
    for _ in range(4):
        group.b.master._mastership.append(FrameKind.EPOCH, "", b"{}      ")
    group.b.host.settle()
    first = group.b.log.stored.read(parted, group.b.log.end, 1).frames[0]
    for size in (first.body_bytes, 8, 8):
        group.a.master._mastership.append(FrameKind.EPOCH, "", b"{}".ljust(size))
    group.a.host.settle()
    group.a.flip(first.end + 20)
    group.a.crash()
    group.a.assign(Role.MASTER, 1)
    assert group.a.node.role is None and group.a.log.damage.begin == first.end
    group.a.node.repairs.apply(first.end, group.b.log.stored.read_bytes(first.end, group.b.log.end))
    assert group.a.log.damage is None and group.a.log.end == first.end and set_aside(group.a)
    assert group.a.node.master is not None


def test_master_is_readonly_until_all_is_repaired():
    group = stored()
    first, second = group.b.log.frames("s", 1, 2)
    for ref in (first, second):
        group.a.flip(ref.offset + 20)
    with pytest.raises(CorruptFrame) as found:
        group.a.log.stored.read(first.offset, group.a.log.end, 1)
    group.a.node.found_damage(found.value)
    group.a.node.repairs.apply(first.offset, group.b.log.stored.read_bytes(first.offset, second.offset))
    left = group.a.log.damage
    assert left.begin == second.offset and group.a.master.readonly.reasons == ["corrupt"]
    group.a.node.repairs.apply(left.begin, group.b.log.stored.read_bytes(left.begin, left.end))
    assert group.a.node.writable


@pytest.mark.parametrize("segments", [1, 2])
def test_only_segment_is_never_dropped(segments):
    group = Group.made(tail_bytes=0, segment_bytes=1 << 14).start()
    while len(group.a.log.bases) < segments or group.a.log.end < 2_000:
        group.client().store("m", size=900)
    met(group.a, 0)
    assert (
        len(group.a.log.bases) == segments and group.a.node.repairs.plan(group.a.log.bases[-1] or 500, 1 << 40) is None
    )
    assert group.a.node.writable is (segments == 2) and len(group.a.log.bases) == 1


def test_damaged_frames_prove_no_other_history():
    group = stored()
    begin = unreplayed(group.b, first_of_newest(group.b))
    with pytest.raises(CorruptFrame):
        group.b.node.repairs.apply(begin, bytes(group.b.log.damage.end - begin))
    assert group.b.log.damage.begin == begin and not quarantined(group.b)


@pytest.mark.parametrize(
    ("first", "end", "is_other"),
    [
        pytest.param(3, 6, True, id="over the whole damage"),
        pytest.param(3, 7, True, id="beyond the damage"),
        pytest.param(3, 5, False, id="within it only"),
        pytest.param(2, 4, False, id="from before it, with a frame that begins at it"),
        pytest.param(2, 3, False, id="up to it"),
        pytest.param(4, 7, False, id="from within it"),
    ],
)
def test_frames_over_the_damage_prove_another_history(first, end, is_other):
    group = stored()
    refs = group.a.log.frames("s", 0, COUNT)
    inside = Damage(refs[3].offset, refs[6].offset, "")
    data = group.a.log.stored.read_bytes(refs[first].offset, refs[end].offset)
    assert _is_other_history(refs[first].offset, data, inside) is is_other


@pytest.mark.parametrize(("begins", "is_other"), [(8, True), (0, False)])
def test_frame_across_the_damage_begin_proves_it(begins, is_other):
    group = stored()
    refs = group.a.log.frames("s", 0, COUNT)
    data = group.a.log.stored.read_bytes(refs[2].offset, refs[4].offset)
    assert _is_other_history(refs[2].offset, data, Damage(refs[3].offset + begins, refs[6].offset, "")) is is_other


# Acknowledged points.


def lacked(group: Group) -> Point:
    return Point(Epoch(1, 1), group.a.log.end + 800, 7)


def test_master_with_slave_in_sync_lacks_nothing():
    group = stored()
    group.a.node.remembered_elsewhere([lacked(group)])
    assert group.a.node.writable


def test_repaired_damage_is_no_rollback():
    """A flip that was repaired a second later made Doctor report a disk that was put back."""
    group, lost = stored(), Point(Epoch(1, 1), 1 << 40, 7)
    point = Point(group.a.master.epoch, group.a.log.end, group.a.log.chain)
    begin = unreplayed(group.b, first_of_newest(group.b))
    group.b.node.remembered_elsewhere([point])
    assert group.b.node.identity.points.lacks == point and group.b.node.readonly_reasons == ["corrupt"]
    wanted = group.b.node.repairs.plan(0, group.a.log.flushed_end)
    group.b.node.repairs.apply(begin, group.a.log.stored.read_bytes(*wanted))
    assert group.b.node.identity.points.lacks is None and group.b.node.readonly_reasons == []
    group.b.node.remembered_elsewhere([lost])
    assert group.b.node.readonly_reasons == ["rolled_back"]


def test_rollback_shows_after_the_repair():
    group, lost = stored(), Point(Epoch(1, 1), 1 << 40, 7)
    begin = unreplayed(group.b, first_of_newest(group.b))
    group.b.node.remembered_elsewhere([lost])
    wanted = group.b.node.repairs.plan(0, group.a.log.flushed_end)
    group.b.node.repairs.apply(begin, group.a.log.stored.read_bytes(*wanted))
    assert group.b.node.readonly_reasons == ["rolled_back"]


def test_restored_point_is_no_longer_lacking():
    group = stored()
    own = Point(group.a.master.epoch, group.a.log.end, group.a.log.chain)
    group.b.node.identity.points.rolled_back(own)
    assert group.b.node.readonly_reasons == ["rolled_back"]
    group.b.crash()
    group.b.assign(Role.SLAVE, 1)
    assert group.b.node.identity.points.lacks is None


# Readers of the oldest segment.


def test_oldest_segment_is_pinned_by_its_readers():
    group = stored()
    second = group.a.log.bases[1]
    assert not group.a.node.is_pinned([]) and not group.a.node.is_pinned([second])
    assert group.a.node.is_pinned([second - 1]) and group.a.node.is_pinned([1 << 60, 0])
    group.b.crash()
    assert group.b.node.role is None and not group.b.node.is_pinned([]) and group.b.node.is_pinned([second - 1])
    met(group.a, COUNT - 5)
    assert group.a.node.is_pinned([]) and Broker("new").node.is_pinned([])


DAMAGE = Damage(100, 200, "a bit")


@pytest.mark.parametrize(
    "extents, best",
    [
        pytest.param([(0, 500)], 0, id="the only one"),
        pytest.param([(100, 200), (0, 190)], 0, id="it has exactly the damage"),
        pytest.param([(100, 200), (150, 300)], 0, id="another has more behind it"),
        pytest.param([(150, 300), (100, 200)], 1, id="the other has more behind it, but not all"),
        pytest.param([], None, id="there is no other copy"),
        pytest.param([(0, 150), (0, 200)], 1, id="the copy that has all"),
        pytest.param([None, (0, 200)], 1, id="one has it, the other does not answer"),
        pytest.param([(0, 150), None], None, id="the silent copy may have it"),
        pytest.param([None], None, id="no copy answers"),
        pytest.param([(0, 150), (150, 180)], 1, id="no copy has it: the longest log is chosen"),
    ],
)
def test_best_source_of_a_repair(extents, best):
    assert Sources().best(DAMAGE, extents) == best


def test_repair_sources_take_turns():
    sources, extents = Sources(), [(0, 500), None, (0, 150), (0, 400)]
    assert [sources.best(DAMAGE, extents) for _ in range(6)] == [0, 0, 3, 3, 0, 0]


def test_new_damage_begins_at_the_first_source():
    sources, extents = Sources(), [(0, 500), (0, 500)]
    assert [sources.best(DAMAGE, extents) for _ in range(3)] == [0, 0, 1]
    assert sources.best(Damage(300, 400, "another bit"), extents) == 0


def test_damage_at_the_other_logs_start_is_fetched():
    group = stored()
    (first,) = (ref.begin for ref in group.a.log.frames("s", 0, COUNT) if ref.offset == group.a.log.bases[1])
    begin = met(group.a, first)
    assert group.a.node.repairs.plan(begin, group.a.log.damage.end) == (begin, group.a.log.damage.end)
    assert group.a.log.start == 0 and group.a.node.role is not None
