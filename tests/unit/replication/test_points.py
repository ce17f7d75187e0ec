"""Core. The acknowledged point outlives the log that it is about."""

from __future__ import annotations

import pytest

from qmq.log.memory_disk import MemoryDisk
from qmq.replication.points import COPY, POINTS, SAVE_MS, Point, PointFile, is_lacking
from qmq.types import Epoch
from tests.unit.log.logs import Copy


def a_log(frames: int = 4) -> tuple[Copy, list[Point]]:
    """A log, and a point at the end of each of its frames."""
    copy = Copy()
    copy.begin_epoch()
    points = []
    for number in range(frames):
        copy.messages(f"m{number}")
        points.append(Point(copy.epoch, copy.log.end, copy.log.chain))
    copy.flush()
    return copy, points


def test_a_log_lacks_a_point_behind_its_end_or_of_another_history():
    copy, points = a_log()
    assert not any(is_lacking(copy.log, point) for point in points)
    assert is_lacking(copy.log, points[1]._replace(chain=7))
    copy.log.cut(points[1].end, "lost")
    assert [is_lacking(copy.log, point) for point in points] == [False, False, True, True]


def test_what_is_saved_is_known_after_a_restart_and_costs_nothing_before_it_is_due():
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


def test_the_high_watermark_is_what_frames_state_or_a_later_point_that_is_on_disk():
    copy, points = a_log()
    file, state = PointFile(MemoryDisk()), copy.log.state
    state.high_watermark = points[1].end
    assert file.high_watermark(copy.log) == points[1].end
    for own, high in (
        (points[0], points[1].end),
        (points[2], points[2].end),
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


def test_a_point_is_saved_no_more_often_than_it_has_to_be():
    file = PointFile(MemoryDisk())
    for number, now_ms in enumerate((SAVE_MS, 2 * SAVE_MS, 3 * SAVE_MS), start=1):
        file.acknowledged(Point(Epoch(1, 1), 100 * number, number))
        assert file.due(now_ms - 1) is None and file.due(now_ms) is not None
        file.saved()
        file.acknowledged(Point(Epoch(1, 1), 100 * number + 1, number))
        assert file.due(now_ms + SAVE_MS - 1) is None


def test_an_older_point_changes_nothing():
    file = PointFile(MemoryDisk())
    newest = Point(Epoch(2, 1), 300, 3)
    file.acknowledged(newest)
    for older in (Point(Epoch(2, 1), 299, 9), Point(Epoch(1, 9), 1000, 9)):
        file.acknowledged(older)
    assert file.own == newest


def test_a_point_of_the_log_before_is_not_one_of_the_log_that_is_seeded():
    disk = MemoryDisk()
    file = PointFile(disk)
    file.acknowledged(Point(Epoch(1, 1), 300, 3))
    late = file.due(SAVE_MS)
    file.seeding()
    late()  # on its thread, only now
    again = PointFile(disk)
    assert again.own is None and again.lacks is None


def test_a_slave_keeps_all_and_a_master_what_it_had_followed_or_knows_to_be_acknowledged():
    copy, points = a_log()
    file = PointFile(MemoryDisk())
    assert file.keeps(copy.log) == copy.log.state.high_watermark
    file.following()
    assert file.keeps(copy.log) == copy.log.end
    file.beginning(points[1].end)
    assert file.keeps(copy.log) == points[1].end
    file.beginning(points[2].end)
    assert file.keeps(copy.log) == points[1].end, "what it wrote in its first mastership, nobody else confirmed"
    file.acknowledged(points[2])
    assert file.keeps(copy.log) == points[2].end


def test_what_a_crash_took_before_its_fsync_is_not_kept():
    """A master took it back and began, and its power went before the fsync: it writes there alone, and gives way."""
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
def test_a_damaged_memory_is_none(name):
    disk = MemoryDisk()
    file = PointFile(disk)
    file.following()
    file.rolled_back(Point(Epoch(1, 1), 100, 1))
    file.acknowledged(Point(Epoch(1, 1), 300, 3))
    file.save()
    disk.flip(name, 8 * (disk.size(name) // 2))
    again = PointFile(disk)
    assert again.own is None or again.lacks is None
