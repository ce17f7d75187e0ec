"""Core. Budget of a pull: how much of a frame fits."""

from __future__ import annotations

import pytest

from qmq.broker import choice
from qmq.broker.choice import Budget, Chosen, Part
from qmq.log.index import FrameRef

LIMIT = 1 << 30


def frame(*, begin: int = 0, messages: int = 10, size: int = 1000) -> FrameRef:
    return FrameRef(begin, begin + messages, 4096, size)


@pytest.mark.parametrize("begin", [0, 1_000_000])
def test_bytes_are_counted_by_the_frames_mean(begin):
    budget = Budget(100, 1500, LIMIT)
    assert budget.allows(frame(begin=begin), 10) == 10
    assert (budget.messages, budget.bytes) == (90, 500)


def test_first_message_always_fits():
    budget = Budget(100, 10, LIMIT)
    assert budget.allows(frame(messages=2), 2) == 1
    assert budget.allows(frame(begin=2, messages=1), 1) == 0 and budget.is_stopped
    assert Budget(100, 0, LIMIT).allows(frame(), 10) == 1


@pytest.mark.parametrize(
    ("messages", "size", "is_cut"),
    [
        (10, 100_000, True),
        (49, 499_999, True),
        (50, 100_000, False),
        (10, 500_000, False),
    ],
)
def test_frame_is_cut_only_for_a_half_empty_pull(messages, size, is_cut):
    """A pull that is half full, by messages or by bytes, leaves the frame whole for the next pull."""
    budget = Budget(100, 1_000_000, LIMIT)
    assert budget.allows(frame(messages=messages, size=size), messages) == messages
    following = frame(begin=messages, messages=1000, size=1_000_000)
    assert bool(budget.allows(following, 1000)) is is_cut
    assert budget.is_stopped


def test_frame_beyond_the_limit_stops_the_pull():
    budget = Budget(100, 1 << 20, 4096 + 999)
    assert budget.allows(frame(), 10) == 0 and budget.is_stopped
    assert Budget(100, 1 << 20, 4096 + 1000).allows(frame(), 10) == 10


def test_full_pull_looks_no_further():
    budget = Budget(10, 1 << 20, LIMIT)
    assert budget.allows(frame(messages=4), 4) == 4 and not budget.is_stopped
    assert budget.allows(frame(begin=4, messages=6), 6) == 6 and budget.is_stopped


def test_choice_has_size_and_end():
    chosen = Chosen(gone=[(2, 4), (6, 7)], dead=[(1, 2)])
    assert chosen.bytes() == 0 and chosen.pull_ends == [7, 2]
    chosen.parts = [Part(7, 18, 22, FrameRef(16, 24, 4096, 800), 1), Part(11, 22, 23, FrameRef(22, 23, 1024, 50), 1)]
    assert (chosen.bytes(), chosen.data_end, chosen.pull_ends) == (450, 4896, [7, 2, 12])


class Frames:
    """Log of frames of one message each, which records its look-ups."""

    def __init__(self, end: int) -> None:
        self.refs, self.looks = [frame(begin=at, messages=1) for at in range(end)], []

    def frames(self, subject: str, sequence: int, most: int) -> list[FrameRef]:
        self.looks.append((sequence, most))
        return [ref for ref in self.refs if ref.end > sequence][:most]


def test_frame_look_ups_double_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(choice, "FRAMES_AT_ONCE", 16)
    log, budget = Frames(100), Budget(1_000, LIMIT, LIMIT)
    for at in (*range(50), 49):
        ref = budget.frame_at(log, "s", at)
        assert ref is not None and ref.begin == at
    assert log.looks == [(0, 4), (4, 8), (12, 16), (28, 16), (44, 16)]
    ref = budget.frame_at(log, "s", 3)
    assert ref is not None and ref.begin == 3, "what came back lies before what is new"
    assert budget.frame_at(log, "s", 100) is None


@pytest.mark.parametrize(("messages", "most", "looked_up"), [(3, 256, 3), (100, 2, 2), (100, 256, 4)])
def test_frame_look_ups_stop_at_the_need(messages, most, looked_up):
    log = Frames(100)
    Budget(messages, LIMIT, LIMIT).frame_at(log, "s", 0, most)
    assert log.looks == [(0, looked_up)]
