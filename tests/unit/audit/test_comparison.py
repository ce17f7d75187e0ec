"""Core. Frames of two copies, compared by offset in one pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qmq.audit import comparison
from qmq.audit.comparison import Comparison, Copied, Differences
from qmq.log.frame import Frame, FrameKind
from qmq.types import Epoch

SIZE = 100
FOREVER = 1 << 40


def copied(number: int, at: int | None = None, **fields: object) -> Copied:
    """Return the frame of message `number`, at its usual place or another one."""
    offset = number * SIZE if at is None else at
    header: dict[str, object] = dict.fromkeys(Frame._fields, 0)
    header |= {"kind": FrameKind.MESSAGES, "subject": "a", "count": 1, "epoch": Epoch(1, 1), "first_sequence": number}
    header |= {"offset": offset, "end": offset + SIZE, "body_crc": number, "chain": number} | fields
    return Copied(Frame(**header), bytes([number % 256]))  # type: ignore[arg-type]


def compared(master: list[Copied], slave: list[Copied], watermark: int = FOREVER) -> Differences:
    comparison_of_two = Comparison(watermark)
    comparison_of_two.take(FOREVER, master, slave)
    return comparison_of_two.finish()


def rows_of(found: Differences) -> list[tuple[str, int, int]]:
    return [(row["what"], row["offset"], row["frames"]) for row in found.rows]


def test_changed_field_is_named() -> None:
    slave = [copied(0), copied(1, batch=7, chain=99), copied(2, chain=98), copied(3, chain=97)]
    found = compared([copied(number) for number in range(4)], slave)
    assert rows_of(found) == [("different", SIZE, 1), ("history", 2 * SIZE, 2)]
    assert found.rows[0]["text"] == "the copies differ in batch"


def test_bodies_of_one_crc_are_compared() -> None:
    found = compared([copied(0)], [copied(0)._replace(body=b"other")])
    assert [row["text"] for row in found.rows] == ["the copies differ in body"]
    assert compared([copied(0)], [copied(0)._replace(body=None)]).rows == []


def test_frames_after_an_extra_one_are_shifted() -> None:
    slave = [copied(0), copied(90, SIZE), *(copied(number, (number + 1) * SIZE) for number in range(1, 6))]
    found = compared([copied(number) for number in range(6)], slave)
    assert rows_of(found) == [("shifted", SIZE, 5), ("extra", SIZE, 1)]
    assert found.rows[0]["text"] == "5 frames with 5 messages stand 100 bytes further on in the slave"


def test_equal_empty_frames_match_at_their_distance() -> None:
    """Every frame of the master equals every frame of the slave, so pairs of them would be a million."""
    empty = {"count": 0, "first_sequence": 0, "body_crc": 5}
    master = [copied(number, **empty) for number in range(1_000)]
    slave = [copied(number, number * SIZE + 40, **empty) for number in range(1_000)]
    shifts = [row for row in compared(master, slave).rows if row["what"] == "shifted"]
    assert sum(row["frames"] for row in shifts) == 1_000


def test_batches_with_other_sequences_are_shifted() -> None:
    def batch(number: int, sequence: int, at: int) -> Copied:
        return copied(number, at, producer=7, batch=number, first_sequence=sequence)

    master = [batch(number, number, number * SIZE) for number in range(5)]
    slave = [batch(90, 0, 0), *(batch(number, number + 1, (number + 1) * SIZE) for number in range(5))]
    found = compared(master, slave)
    assert rows_of(found) == [("shifted", 0, 5), ("extra", 0, 1)]
    assert found.rows[0]["text"].endswith("; 5 of them have other sequences there")


def test_lacking_neighbours_are_one_finding() -> None:
    master = [copied(number) for number in range(8)]
    slave = [frame for frame in master if frame.frame.first_sequence not in (2, 3, 6)]
    assert rows_of(compared(master, slave)) == [("missing", 2 * SIZE, 2), ("missing", 6 * SIZE, 1)]
    assert rows_of(compared(slave, master, watermark=3 * SIZE)) == [("extra", 2 * SIZE, 1), ("extra", 3 * SIZE, 2)]


def test_messages_at_another_offset_are_reordered() -> None:
    master = [copied(0), copied(1), copied(2)]
    slave = [copied(0), copied(2, SIZE), copied(1, 2 * SIZE)]
    assert [(what, offset) for what, offset, _ in rows_of(compared(master, slave))] == [
        ("reordered", SIZE),
        ("reordered", 2 * SIZE),
    ]


def test_frames_in_a_damaged_range_are_not_missing() -> None:
    of_two = Comparison(FOREVER, [("slave", SIZE, 2 * SIZE)])
    of_two.take(FOREVER, [copied(0), copied(1), copied(2)], [copied(0)])
    assert rows_of(of_two.finish()) == [("missing", 2 * SIZE, 1)]


def test_findings_beyond_the_list_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "FINDINGS_MAX", 3)
    found = compared([copied(number) for number in range(9)], [copied(number, batch=1) for number in range(9)])
    assert (len(found.rows), found.more) == (3, {"different": 6})


def test_comparison_ends_at_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """One finding stands for the other pieces; a frame near the cut is not missing if its copy lies behind the cut."""
    monkeypatch.setattr(comparison, "UNLIKE_MAX", 20)

    def pieces(shift: int) -> Iterator[list[Copied]]:
        moved = [copied(number, number * SIZE + shift) for number in range(40)]
        for begin in range(0, 40 * SIZE, 20 * SIZE):
            yield [frame for frame in moved if begin <= frame.frame.offset < begin + 20 * SIZE]

    of_two = Comparison(FOREVER)
    for number, (master, slave) in enumerate(zip(pieces(0), pieces(SIZE)), 1):
        of_two.take(number * 20 * SIZE, master, slave)
        if of_two.is_full:
            break
    assert of_two.is_full
    found = of_two.finish([(20 * SIZE, 40 * SIZE)])
    assert rows_of(found) == [("shifted", 0, 19), ("different", 20 * SIZE, 1)]
    assert found.rows[-1]["end"] == 40 * SIZE
