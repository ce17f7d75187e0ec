"""Core. The system's memory keeps only the newest part of a log."""

from __future__ import annotations

import os

import pytest

from qmq.log.disk import COLD_READ_BYTES, STEP_BYTES, PageCache, RealDisk
from qmq.log.system import System

KEEP = 4 * STEP_BYTES


class File:
    def __init__(self, fd: int) -> None:
        self.fd = fd


@pytest.fixture
def dropped(monkeypatch):
    """Return the ranges (fd, begin, end) that the system was asked to drop."""
    ranges = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, size, advice: ranges.append((fd, at, at + size)))
    return ranges


def written(cache: PageCache, file: File, *, pieces: int, of: int = STEP_BYTES, at: int = 0) -> None:
    for piece in range(pieces):
        cache.synced(file, at + piece * of, at + (piece + 1) * of)


def test_bytes_within_the_limit_stay_cached(dropped):
    written(PageCache(System(), KEEP), File(1), pieces=5, at=1 << 40)
    assert dropped == []


def test_oldest_bytes_are_dropped_first(dropped):
    cache = PageCache(System(), KEEP)
    written(cache, File(1), pieces=8, at=1 << 40)
    begin = 1 << 40
    assert dropped == [(1, begin + n * STEP_BYTES, begin + (n + 1) * STEP_BYTES) for n in range(3)]


@pytest.mark.parametrize("at", [0, 1 << 40])
def test_small_writes_are_dropped_as_one_range(dropped, at):
    cache, small = PageCache(System(), KEEP), STEP_BYTES // 8
    written(cache, File(1), pieces=8 * 6, of=small, at=at)
    assert dropped == [(1, at, at + STEP_BYTES)]


def test_gaps_between_writes_are_not_dropped(dropped):
    cache, file = PageCache(System(), KEEP), File(1)
    cache.synced(file, 0, 100)
    cache.synced(file, 200, 300)
    written(cache, file, pieces=6, at=300)
    assert dropped[:2] == [(1, 0, 100), (1, 200, 300 + STEP_BYTES)]


def test_latest_write_stays_at_any_size(dropped):
    PageCache(System(), KEEP).synced(File(1), 0, 2 * KEEP)
    assert dropped == []


def test_new_segment_is_a_separate_range(dropped):
    cache = PageCache(System(), KEEP)
    cache.synced(File(1), 0, 100)
    written(cache, File(2), pieces=6, at=100)
    assert dropped == [(1, 0, 100), (2, 100, 100 + STEP_BYTES)]


@pytest.mark.parametrize(
    ("fd", "begin", "end", "is_dropped"),
    [
        (1, 0, 100, True),
        (1, 0, 50, True),
        (1, 50, 101, False),
        (1, 150, 250, False),
        (1, 200, 300, True),
        (2, 100, 200, True),
    ],
)
def test_old_bytes_are_dropped_after_reading(dropped, fd, begin, end, is_dropped):
    files = {1: File(1), 2: File(2)}
    cache = PageCache(System(), KEEP)
    cache.synced(files[1], 100, 200)
    cache.was_read(files[fd], begin, end)
    assert dropped == ([(fd, begin, end)] if is_dropped else [])


def test_synced_bytes_are_dropped_from_first_write(tmp_path, dropped):
    disk = RealDisk(tmp_path, cached_bytes=KEEP)
    disk.create("log/0.log", 8 * STEP_BYTES)
    for half in range(2):
        disk.write("log/0.log", half * STEP_BYTES, [bytes(STEP_BYTES // 2), bytes(STEP_BYTES // 2)])
    disk.sync("log/0.log")
    disk.write("log/0.log", 2 * STEP_BYTES, [bytes(5 * STEP_BYTES)])
    disk.sync("log/0.log")
    assert [(begin, end) for _, begin, end in dropped] == [(0, 2 * STEP_BYTES)]


@pytest.mark.parametrize(("size", "is_dropped"), [(COLD_READ_BYTES - 1, False), (COLD_READ_BYTES, True)])
def test_long_reads_are_dropped(tmp_path, dropped, size, is_dropped):
    disk = RealDisk(tmp_path, cached_bytes=KEEP)
    disk.put("file", bytes(2 * COLD_READ_BYTES))
    assert len(disk.read("file", 100, size)) == size
    assert [(begin, end) for _, begin, end in dropped] == [(100, 100 + size)] * is_dropped


def test_disk_without_cache_limit_drops_nothing(dropped, tmp_path):
    disk = RealDisk(tmp_path, cached_bytes=None)
    disk.put("file", bytes(COLD_READ_BYTES))
    disk.write("file", 0, [b"x"])
    disk.sync("file")
    assert len(disk.read("file", 0, COLD_READ_BYTES)) == COLD_READ_BYTES and dropped == []
    disk.close()
