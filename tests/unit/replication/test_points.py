"""Core. The acknowledged point, stored outside the log."""

from __future__ import annotations

import logging
from functools import partial

import pytest

from qmq.errors import CorruptFrame
from qmq.log.memory_disk import MemoryDisk
from qmq.replication.identity import COPY, POINTS, SAVE_MS, Point, PointFile, is_lacking, log_lacking
from qmq.types import Epoch
from tests.unit.log.logs import Copy


def a_log(frames: int = 4) -> tuple[Copy, list[Point]]:
    """Return a log, and a point at the end of each frame."""
    copy = Copy.begun()
    points = []
    for number in range(frames):
        copy.messages(f"m{number}")
        points.append(Point(copy.epoch, copy.log.end, copy.log.chain))
    copy.flush()
    return copy, points


def test_log_lacks_points_beyond_it_or_foreign():
    copy, points = a_log()
    assert not any(is_lacking(copy.log, point) for point in points)
    assert is_lacking(copy.log, points[1]._replace(chain=7))
    copy.log.cut(points[1].end, "lost")
    assert [is_lacking(copy.log, point) for point in points] == [False, False, True, True]


def test_deleted_or_unreadable_points_are_not_lacking():
    copy = Copy.filled(60, tail_bytes=0)
    first, second = copy.log.bases[1:3]
    inside = copy.log.stored.read(first, second, 1).frames[0].end
    copy.drop_oldest_segment()
    assert copy.log.start == first
    assert not any(is_lacking(copy.log, Point(copy.epoch, end, 7)) for end in (0, first - 8, first))
    assert is_lacking(copy.log, Point(copy.epoch, inside, 7))
    for at in (first, inside):
        copy.flip(at + 20)
    assert not is_lacking(copy.log, Point(copy.epoch, inside, 7)), "damage is not another history"


@pytest.mark.parametrize("number", [0, (1 << 64) - 1])
def test_point_survives_its_list(number):
    point = Point(Epoch(number, number), number, number)
    assert Point.from_list(point.to_list()) == point


@pytest.mark.parametrize("wrong", [[1, 1, 40], [1, 1, 40, 5, 6], [1, 1, 40, -1], [1, 1, 40, 1 << 64], [1.0, 1, 40, 5]])
def test_malformed_point_is_refused(wrong):
    with pytest.raises(ValueError):
        Point.from_list(wrong)


def test_point_is_saved_when_due():
    disk = MemoryDisk()
    file = PointFile(disk)
    for number in range(1, 4):
        file.acknowledged(Point(Epoch(1, 1), 100 * number, number))
    assert disk.size(POINTS) == 0 and PointFile(disk).own is None
    assert file.due(SAVE_MS - 1) is None
    job = file.due(SAVE_MS)
    file.acknowledged(Point(Epoch(1, 1), 400, 4))
    assert file.due(3 * SAVE_MS) is None, "one at a time"
    job()
    file.saved()
    assert PointFile(disk).own == Point(Epoch(1, 1), 300, 3)
    file.save()
    assert PointFile(disk).own == Point(Epoch(1, 1), 400, 4)


def test_high_watermark_after_a_restart():
    copy, points = a_log()
    file, state = PointFile(MemoryDisk()), copy.log.state
    state.high_watermark = points[1].end
    assert file.high_watermark(copy.log) == points[1].end
    for own, high in (
        (points[0], points[1].end),
        (points[2], points[2].end),
        (points[3], copy.log.flushed_end),
        (points[2]._replace(chain=7), points[1].end),
        (points[2]._replace(end=copy.log.end + 8), points[1].end),
    ):
        file.own = own
        assert file.high_watermark(copy.log) == high, own
    copy.messages("not on disk")
    file.own = Point(copy.epoch, copy.log.end, copy.log.chain)
    assert file.high_watermark(copy.log) == points[1].end
    state.high_watermark = copy.log.end
    assert file.high_watermark(copy.log) == copy.log.flushed_end


def test_points_are_saved_at_most_per_interval():
    file = PointFile(MemoryDisk())
    for number, now_ms in enumerate((SAVE_MS, 2 * SAVE_MS, 3 * SAVE_MS), start=1):
        file.acknowledged(Point(Epoch(1, 1), 100 * number, number))
        assert file.due(now_ms - 1) is None and file.due(now_ms) is not None
        file.saved()
        file.acknowledged(Point(Epoch(1, 1), 100 * number + 1, number))
        assert file.due(now_ms + SAVE_MS - 1) is None


def test_only_newer_points_are_written():
    disk = MemoryDisk()
    file = PointFile(disk)

    def is_written(act) -> bool:
        before = disk.calls
        act()
        return disk.calls > before

    assert not is_written(file.save) and not file.is_newer_than_saved and file.due(1 << 60) is None
    file.acknowledged(Point(Epoch(1, 1), 300, 3))
    assert file.is_newer_than_saved and is_written(file.save)
    assert not file.is_newer_than_saved and not is_written(file.save) and file.due(1 << 60) is None
    file.acknowledged(Point(Epoch(1, 1), 301, 4))
    job = file.due(1 << 60)
    assert file.is_newer_than_saved, "a thread is writing it"
    file.acknowledged(Point(Epoch(1, 1), 302, 5))
    assert not is_written(file.save), "not while a thread does"
    job()
    file.saved()
    assert file.is_newer_than_saved and is_written(file.save) and PointFile(disk).own.end == 302
    for act in (file.following, partial(file.rolled_back, Point(Epoch(1, 1), 300, 3))):
        assert is_written(act) and not is_written(act)


def test_newest_lacking_point_stays_until_refilled():
    disk = MemoryDisk()
    file = PointFile(disk)
    for end, newest in ((300, 300), (200, 300), (400, 400)):
        file.rolled_back(Point(Epoch(1, 1), end, end))
        assert PointFile(disk).lacks == file.lacks == Point(Epoch(1, 1), newest, newest)
    file.rolled_back(Point(Epoch(1, 1), 400, 9))
    assert file.lacks == Point(Epoch(1, 1), 400, 400)
    file.refilled()
    assert file.lacks is None and PointFile(disk).lacks is None


def test_forgotten_point_is_neither_lacking_nor_kept():
    disk = MemoryDisk()
    file = PointFile(disk)
    file.following()
    file.acknowledged(Point(Epoch(1, 1), 300, 3))
    file.save()
    file.rolled_back(Point(Epoch(1, 1), 300, 3))
    file.forget()
    assert (file.own, file.lacks) == (PointFile(disk).own, PointFile(disk).lacks) == (None, None)
    file.seeding()
    assert PointFile(disk).own is None, "of an earlier log"


def test_older_point_changes_nothing():
    file = PointFile(MemoryDisk())
    newest = Point(Epoch(2, 1), 300, 3)
    file.acknowledged(newest)
    for older in (Point(Epoch(2, 1), 299, 9), Point(Epoch(2, 1), 300, 9), Point(Epoch(1, 9), 1000, 9)):
        file.acknowledged(older)
    assert file.own == newest


def test_seeding_forgets_the_point_of_the_old_log():
    (copy, _), disk = a_log(), MemoryDisk()
    file = PointFile(disk)
    file.acknowledged(Point(Epoch(1, 1), 300, 3))
    late = file.due(SAVE_MS)
    file.seeding()
    late()  # its thread was late
    again = PointFile(disk)
    assert again.own is None and again.lacks is None and again.keeps(copy.log) == copy.log.end
    file.saved()
    file.save()
    assert file.own is None and PointFile(disk).own is None


def test_kept_end_of_slave_and_master():
    copy, points = a_log()
    file = PointFile(MemoryDisk())
    assert file.keeps(copy.log) == copy.log.state.high_watermark
    file.following()
    assert file.keeps(copy.log) == copy.log.end
    file.beginning(points[1].end)
    assert file.keeps(copy.log) == points[1].end
    file.beginning(points[2].end)
    assert file.keeps(copy.log) == points[1].end, "frames of its first mastership are unconfirmed"
    file.acknowledged(points[2])
    assert file.keeps(copy.log) == points[2].end


def test_frames_lost_in_a_crash_are_not_kept():
    """The master restored these frames, began, and lost power before the fsync. Its next frames there are its own."""
    copy, points = a_log()
    file = PointFile(MemoryDisk())
    file.following()
    file.beginning(points[3].end)
    copy.log.cut(points[1].end, "lost")
    file.beginning(points[1].end)
    copy.messages("alone 1", "alone 2")
    copy.messages("alone 3")
    assert file.keeps(copy.log) == points[1].end


@pytest.mark.parametrize("name", [POINTS, COPY])
def test_damaged_point_file_counts_as_missing(name):
    disk = MemoryDisk()
    file = PointFile(disk)
    file.following()
    file.rolled_back(Point(Epoch(1, 1), 100, 1))
    file.acknowledged(Point(Epoch(1, 1), 300, 3))
    file.save()
    disk.flip(name, 8 * (disk.size(name) // 2))
    again = PointFile(disk)
    assert again.own is None or again.lacks is None


def test_damaged_copy_is_not_logged_as_rolled_back(caplog):
    """A flip that was repaired a second later was CRITICAL "rolled back"."""
    copy, point = Copy.filled(3, tail_bytes=0), Point(Epoch(1, 1), 1 << 40, 7)
    log_lacking(copy.log, "g1", point, "the master")
    copy.flip(120)
    copy.log.damaged_at(CorruptFrame(0, "test"))
    log_lacking(copy.log, "g1", point, "the master")
    assert [(record.levelno, record.getMessage()[:11]) for record in caplog.records] == [
        (logging.CRITICAL, "rolled back"),
        (logging.ERROR, "log damaged"),
    ]
