"""Core. The schedule is a function of the log's frames, over restarts, cuts and damage."""

from __future__ import annotations

from zlib import crc32

import pytest

from qmq.delayserver.schedule import DamagedSchedule, Schedule, State, id_hash, key_hash
from qmq.log.delay_frames import Outcome
from qmq.log.memory_disk import MemoryDisk
from tests.unit.delayserver.delay_log import HOUR_MS, DelayLog, delayed, flush_all, places


def opened(disk: MemoryDisk, log: DelayLog, *, segment_ms: int = HOUR_MS, keep_ms: int = 0) -> Schedule:
    schedule = Schedule(disk, segment_ms=segment_ms, log_start=log.start, keep_ms=keep_ms)
    log.file_into(schedule)
    return schedule


def many(count: int, *, first: int = 0, due_ms: int = 0, step_ms: int = 1000) -> list[bytes]:
    return [delayed("s", f"m{first + i}", due_ms + i * step_ms) for i in range(count)]


def listed(schedule: Schedule, begin_ms: int = 0, end_ms: int = 1 << 62, **options):
    return places(
        schedule.list(begin_ms, end_ms, options.pop("subject", None), options.pop("most", 10**6), **options)()
    )


def states(schedule: Schedule, *ids: str) -> list[State]:
    found = schedule.find(None, [id_hash(id) for id in ids], [])()
    return [message.state for message in sorted(found, key=lambda message: message.position)]


def test_record_holds_place_and_attributes():
    log, disk = DelayLog(), MemoryDisk()
    messages = [delayed("s", "a", 5000), delayed("s", "bcd", 7000, key="order-7")]
    where = log.messages(messages, labels=[3, 1 << 40])
    schedule = opened(disk, log)
    records = schedule.list(0, 10_000, "s", 10)()
    assert places(records) == where
    assert records["size"].tolist() == [len(message) for message in messages]
    assert records["crc"].tolist() == [crc32(message) for message in messages]
    assert records["id_hash"].tolist() == [id_hash("a"), id_hash("bcd")]
    assert records["key_hash"].tolist() == [0, key_hash("order-7")]
    assert records["label"].tolist() == [3, 1 << 40]
    assert [schedule.subjects[subject] for subject in records["subject"]] == ["s", "s"]
    frame, body = log.frames[0]
    for number, message in zip(records["number"].tolist(), messages, strict=True):
        at = number - frame.offset - frame.body_at
        assert body[at : at + len(message)] == message


@pytest.mark.parametrize("due_ms", [-(1 << 63), -1, 0, 1 << 62, (1 << 63) - 1])
def test_extreme_due_times_are_stored(due_ms):
    log, disk = DelayLog(), MemoryDisk()
    log.messages([delayed("s", "a", due_ms), *many(3)])
    schedule = opened(disk, log)
    flush_all(schedule)
    assert len(listed(Schedule(disk, segment_ms=HOUR_MS, log_start=log.start), 0, (1 << 62) + 1)) == 4


def test_carried_message_replaces_the_old_one():
    log, disk = DelayLog(), MemoryDisk()
    where = log.messages(many(3))
    log.cancel(where[2:])
    new = log.carry([where[0], (0, 0), where[2], (17, 5)], [delayed("s", f"n{i}", HOUR_MS + i) for i in range(4)])
    schedule = Schedule(disk, segment_ms=HOUR_MS, log_start=log.start)
    filed = log.file_into(schedule)
    assert places(filed[2].done) == where[:1]
    assert listed(schedule) == [where[1], new[0], new[1], new[3]], "nothing in place of a cancelled one"
    assert states(schedule, "m0") == [State.MOVED]


def test_restart_files_only_frames_after_the_checkpoint():
    log, disk = DelayLog(), MemoryDisk()
    where = log.messages(many(500, step_ms=20_000))
    log.cancel(where[400:])
    where = where[:400]
    schedule = opened(disk, log)
    flush_all(schedule)
    disk.crash()
    filed_end = schedule.filed_end
    where += log.messages(many(200, first=500))
    log.file_into(schedule)
    disk.crash()
    again = Schedule(disk, segment_ms=HOUR_MS, log_start=log.start)
    assert (again.filed_end, again.rebuilt) == (filed_end, "")
    log.file_into(again)
    assert listed(again) == sorted(where, key=lambda place: place[::-1])
    assert again.counts(0, 1 << 60) == schedule.counts(0, 1 << 60)


def test_marks_are_written_once():
    log, disk = DelayLog(), MemoryDisk()
    where = log.messages(many(1000))
    log.cancel(where[:300])
    schedule = opened(disk, log)
    flush_all(schedule)
    (name,) = [name for name in disk.names("segments") if name.endswith(".marks")]
    size = disk.size("segments/" + name)
    for _ in range(3):
        schedule = Schedule(disk, segment_ms=HOUR_MS, log_start=log.start)
        log.cancel([])
        log.file_into(schedule)
        flush_all(schedule)
        assert disk.size("segments/" + name) == size
    assert listed(schedule) == where[300:]


@pytest.mark.parametrize("byte", [0, 5, 9, 17, 30, 47, 48, 60, 3119, 3120, 7000])
def test_damaged_block_raises_for_each_reader(byte):
    log, disk = DelayLog(), MemoryDisk()
    where = log.messages(many(200))
    schedule = opened(disk, log)
    flush_all(schedule)
    (name,) = [name for name in disk.names("segments") if name.endswith(".records")]
    disk.flip("segments/" + name, 8 * byte)
    piece = schedule.next_piece(HOUR_MS)
    assert piece is not None
    for read in (piece.read, schedule.find(None, [1], []), schedule.list(0, HOUR_MS, None, 5)):
        with pytest.raises(DamagedSchedule):
            read()
    log.cancel(where[64 * (byte // 3120) :][:1])
    with pytest.raises(DamagedSchedule):
        log.file_into(schedule)


@pytest.mark.parametrize("suffix", [".records", ".marks"])
def test_incomplete_file_rebuilds_the_schedule(suffix):
    log, disk = DelayLog(), MemoryDisk()
    where = log.messages(many(500))
    log.cancel(where[:300])
    flush_all(opened(disk, log))
    (name,) = [name for name in disk.names("segments") if name.endswith(suffix)]
    disk.truncate("segments/" + name, disk.size("segments/" + name) - 1)
    schedule = Schedule(disk, segment_ms=HOUR_MS, log_start=log.start)
    assert name in schedule.rebuilt
    assert schedule.filed_end == log.start
    assert disk.names("segments") == []
    log.file_into(schedule)
    assert listed(schedule) == where[300:]


def test_counts_are_per_hour_and_subject():
    log, disk = DelayLog(), MemoryDisk()
    where = log.messages(many(90, step_ms=60_000))
    log.messages([delayed("t", "x", 5)], subject="t")
    log.cancel(where[:10])
    schedule = opened(disk, log)
    assert schedule.counts(0, 2 * HOUR_MS) == {0: 51, HOUR_MS: 30}
    assert schedule.counts(0, HOUR_MS, "s") == {0: 50}
    assert schedule.counts(0, HOUR_MS, "t") == {0: 1}
    assert schedule.counts(0, HOUR_MS, "u") == {}


def test_listing_continues_where_it_ended():
    log, disk = DelayLog(), MemoryDisk()
    where = log.messages(many(300, step_ms=30_000)) + log.messages(many(300, first=300, step_ms=30_000))
    schedule = opened(disk, log)
    found: list[tuple[int, int]] = []
    after = None
    while part := listed(schedule, 60_000, 2 * HOUR_MS, subject="s", most=70, after=after):
        found += part
        after = part[-1][::-1]
    assert found == sorted((p for p in where if 60_000 <= p[1] < 2 * HOUR_MS), key=lambda place: place[::-1])


def test_message_is_found_by_id_or_key():
    log, disk = DelayLog(), MemoryDisk()
    log.messages(many(1000, step_ms=60_000))
    where = log.messages([delayed("s", "mine", 3 * HOUR_MS, key="k"), delayed("s", "other", 5, key="k")])
    schedule = opened(disk, log)
    flush_all(schedule)
    for due_ms in (0, 3 * HOUR_MS, 99 * HOUR_MS):
        found = schedule.find("s", [id_hash("none"), id_hash("mine")], [], [due_ms])()
        assert [(found.by_key, found.position, int(found.record["number"])) for found in found] == [
            (False, 1, where[0][0])
        ]
    keyed = schedule.find("s", [], [key_hash("k")], [7])
    assert [int(found.record["number"]) for found in keyed.near()] == [where[1][0]]
    assert [int(found.record["number"]) for found in keyed.far()] == [where[0][0]]
    assert schedule.find("t", [id_hash("mine")], [])() == []


def test_pending_from_is_the_lowest_pending_offset():
    log, disk = DelayLog(), MemoryDisk()
    where = log.messages(many(100)) + log.messages(many(100, first=100, due_ms=5 * HOUR_MS))
    schedule = opened(disk, log)
    border = where[150][0]
    assert places(schedule.pending_below(border)()) == where[:150]
    log.dispatch("group", where[:1], producer=1, batch=1)
    log.cancel(where[1:140])
    log.file_into(schedule)
    assert places(schedule.pending_below(border)()) == where[140:150]
    assert schedule.pending_from() <= where[0][0]
    log.settled(1, 1, Outcome.STORED)
    log.cancel(where[140:])
    log.file_into(schedule)
    assert schedule.pending_from() == log.end


def test_finished_segment_is_deleted_after_its_time():
    log, disk = DelayLog(), MemoryDisk()
    where = log.messages(many(100))
    log.messages([delayed("s", "later", 9 * HOUR_MS)])
    log.cancel(where)
    schedule = opened(disk, log, keep_ms=HOUR_MS)
    flush_all(schedule, 2 * HOUR_MS - 1)
    assert states(schedule, "m5") == [State.CANCELLED]
    again = Schedule(disk, segment_ms=HOUR_MS, log_start=log.start, keep_ms=HOUR_MS)
    assert states(again, "m5") == [State.CANCELLED]
    log.cancel([])
    log.file_into(again)
    flush_all(again, 2 * HOUR_MS)
    assert states(again, "m5") == []
    assert (again.segments, disk.names("segments")) == (1, ["checkpoint"])


def test_question_about_a_deleted_segment_finds_nothing():
    log, disk = DelayLog(), MemoryDisk()
    where = log.messages(many(100))
    later = log.messages([delayed("s", "later", 9 * HOUR_MS)])
    schedule = opened(disk, log)
    flush_all(schedule)
    log.cancel(where)
    log.file_into(schedule)
    find, below = schedule.find(None, [id_hash("m1"), id_hash("later")], []), schedule.pending_below(log.end)
    listing = schedule.list(0, 1 << 60, None, 1000)
    flush_all(schedule, HOUR_MS)
    assert disk.names("segments") == ["checkpoint"]
    assert [int(found.record["number"]) for found in find()] == [later[0][0]]
    assert places(below()) == places(listing()) == later


def test_finished_segment_is_not_loaded():
    log, disk = DelayLog(), MemoryDisk()
    log.cancel(log.messages(many(100)))
    schedule = opened(disk, log)
    assert schedule.next_piece(HOUR_MS) is None
    where = log.messages(many(1, first=100))
    (filed,) = log.file_into(schedule)
    assert places(filed.added) == where


def test_segment_being_read_is_not_deleted():
    log, disk = DelayLog(), MemoryDisk()
    where = log.messages(many(100))
    schedule = opened(disk, log)
    flush_all(schedule)
    piece = schedule.next_piece(HOUR_MS)
    assert piece is not None
    log.cancel(where)
    log.file_into(schedule)
    flush_all(schedule, 2 * HOUR_MS)
    assert places(schedule.handed(piece, piece.read())) == []
    log.cancel([])
    log.file_into(schedule)
    flush_all(schedule, 2 * HOUR_MS)
    assert disk.names("segments") == ["checkpoint"]


def test_schedule_before_the_log_start_is_rebuilt():
    log, disk = DelayLog(), MemoryDisk()
    log.messages(many(3))
    flush_all(opened(disk, log))
    assert "the log begins at" in Schedule(disk, segment_ms=HOUR_MS, log_start=log.end + 8).rebuilt


def test_clock_jump_does_not_delay_the_checkpoint():
    log, disk = DelayLog(), MemoryDisk()
    schedule = Schedule(disk, segment_ms=HOUR_MS, log_start=log.start)
    for now_ms in (1000 * HOUR_MS, 976 * HOUR_MS):
        log.messages(many(1))
        log.file_into(schedule)
        flush = schedule.take_flush(now_ms)
        assert flush is not None and flush.checkpoint is not None
        flush.perform()
        schedule.flushed(flush)
