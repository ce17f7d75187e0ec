"""Core. Dead letters are compared with their originals wherever these lie; unknown originals are no finding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from qmq.audit import dead_letters
from qmq.audit.copies import PathCopy
from qmq.audit.dead_letters import DeadLetterHistory, check_dead_letters, dead_letter_of
from qmq.dead_letters import fingerprint, letters_producer, original_subject, with_fate
from qmq.log.frame import Frame, FrameKind
from qmq.log.group import Consumer, Group, UnackedRange
from qmq.log.progress_frame import DEAD, Progress
from qmq.subjects import dead_letter_subject, retry_subject
from qmq.types import Epoch
from tests.unit.audit.beside import WRONG, bases_of
from tests.unit.audit.forged import DEAD as DEAD_SUBJECT
from tests.unit.audit.forged import C, a_message, forged, write_world
from tests.unit.audit.logs import LogWriter
from tests.unit.audit.test_messages import facts_of
from tests.unit.audit.test_walk import flip

S, G = "order.changed", "billing"
MAILBOX = retry_subject(S, G)


def wrong(data: Path) -> list[tuple[str, int]]:
    """Return the problems of a log's dead letters, by their own sequence."""
    letters = facts_of(data).letters()
    assert letters
    with closing(PathCopy(data)) as copy:
        found = check_dead_letters(copy, copy.bases, letters)
        return [(row["what"], row["sequence"]) for row in found]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogWriter]:
    log = LogWriter.begun(tmp_path)
    yield log


@pytest.mark.parametrize("source", [S, MAILBOX])
def test_dead_letter_is_recognised_by_producer_and_batch(source: str) -> None:
    assert original_subject((S, G), letters_producer(source, G)) == source
    assert original_subject((S, G), 7) is None


@pytest.mark.parametrize("message", [a_message(S, 3), b"no message at all", with_fate(a_message(S, 3), 2, "before", 1)])
def test_dead_letter_shares_its_originals_fingerprint(message: bytes) -> None:
    assert fingerprint(with_fate(message, 5, "it failed", 9)) == fingerprint(message)
    assert fingerprint(with_fate(a_message(S, 4), 5, "it failed", 9)) != fingerprint(message)


def test_produced_message_is_no_dead_letter(log: LogWriter) -> None:
    log.batch(dead_letter_subject(S, G), 3)
    assert facts_of(log.close()).letters() == []


def test_dead_letters_in_chosen_subjects_are_compared(log: LogWriter) -> None:
    log.messages(S, [a_message(S, 0), a_message(S, 1)])
    for sequence in (1, 7):
        log.dead_letter(S, G, sequence, a_message(S, sequence), 2, to="chosen")
    log.batch("chosen", 2)
    data = log.close()
    assert [(letter.source, letter.group, letter.sequence) for letter in facts_of(data).letters()] == [
        (S, G, 1),
        (S, G, 7),
    ]
    assert wrong(data) == [("dead_unfounded", 1)]


def test_originals_are_found_by_index_and_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_world(tmp_path)
    monkeypatch.setattr(dead_letters, "BLOCK_BYTES", 10_000)
    assert wrong(tmp_path) == []
    for path in (tmp_path / "log").glob("*.idx"):
        path.unlink()
    assert wrong(tmp_path) == []


@pytest.mark.parametrize("has_index", [True, False])
def test_an_altered_original_is_found_many_segments_before(tmp_path: Path, has_index: bool) -> None:
    """The last delivery of the message is much later."""
    write_world(tmp_path)
    with forged(tmp_path) as frames:
        last = [frame for frame in frames if frame.subject == DEAD_SUBJECT][-1]
        last.batch, last.messages = 1, [with_fate(a_message(C, 1, "z"), 2, "it failed", 1)]
    if not has_index:
        (tmp_path / "log" / f"{0:020d}.idx").unlink()
    assert wrong(tmp_path) == [("dead_altered", 58)]


def test_a_wrong_index_blames_no_dead_letter(tmp_path: Path) -> None:
    write_world(tmp_path)
    for base in bases_of(tmp_path)[:-1]:
        WRONG["a frame left out"](tmp_path, base)
    assert wrong(tmp_path) == []


def test_originals_removed_by_retention_are_no_finding(tmp_path: Path) -> None:
    log = LogWriter.begun(tmp_path, start=4096)
    log.sequences[S] = 10
    log.batch(S, 2)
    log.dead_letter(S, G, 7, a_message(S, 7), 2)
    log.dead_letter("another", G, 7, a_message("another", 7), 2)
    assert wrong(log.close()) == []


def test_missing_original_is_found_after_retention(tmp_path: Path) -> None:
    log = LogWriter.begun(tmp_path, start=4096)
    log.batch(S, 2, first=10)
    log.dead_letter(S, G, 12, a_message(S, 12), 2)
    log.batch(S, 2, first=12)
    log.messages(S, [a_message(S, 14)], first=14)
    log.dead_letter(S, G, 14, a_message(S, 14), 2)
    assert wrong(log.close()) == [("dead_unfounded", 0)]


def test_damage_may_hide_the_original(log: LogWriter) -> None:
    original = log.batch(S, 1)
    log.dead_letter(S, G, 0, a_message(S, 0), 2)
    data = log.close()
    flip(data, original.offset + 20)
    assert wrong(data) == []


def a_letter(sequence: int = 5, times: int = 2, source: str = S) -> Any:
    body = with_fate(a_message(S, sequence), times, "it failed", sequence)
    frame = a_frame(FrameKind.MESSAGES)._replace(
        subject=dead_letter_subject(S, G), count=1, producer=letters_producer(source, G), batch=sequence
    )
    return dead_letter_of(frame, body)


def a_frame(kind: FrameKind) -> Frame:
    return Frame(kind, 0, S, 0, 0, Epoch(1, 1), 900, 0, 0, 0, 0, 0, 0, 0, 120, 1020)


def a_group(*held: UnackedRange) -> Group:
    return Group(10, consumers={"c": Consumer(100, list(held))})


def judged(*letters: Any, group: Group | None = None, may_be_older: bool = False) -> list[str]:
    judge = DeadLetterHistory()
    return [row["what"] for letter in letters for row in judge.take(letter, group, may_be_older=may_be_older)]


def test_dead_letter_needs_a_held_original() -> None:
    held = a_group(UnackedRange(3, 5, 1, 2))
    assert judged(a_letter(), group=held) == []
    assert judged(a_letter(6), group=held) == ["dead_unfounded"]
    assert judged(a_letter(6), group=held, may_be_older=True) == []
    assert judged(a_letter(times=3), group=held) == ["dead_altered"]
    assert judged(a_letter(), a_letter(), group=held) == ["dead_twice"]
    assert judged(a_letter(), group=None) == ["dead_unfounded"]


@pytest.mark.parametrize(
    ("consumer", "source", "accepted"),
    [("c", S, {2, 3, 7}), ("/expired", S, {2, 6}), ("c", MAILBOX, {2, 3, 4, 5, 6, 7, 8})],
    ids=["delivered", "expired", "mailbox"],
)
def test_counts_of_old_and_new_brokers_are_accepted(consumer: str, source: str, accepted: set[int]) -> None:
    """Of three attempts the last may be a delivery without a begun handler. Version 0.2 added four suspicions. The
    message of a mailbox states earlier attempts, which its log lacks.
    """
    group = Group(10, consumers={consumer: Consumer(100, [UnackedRange(3, 5, 1, 3, 4)])})
    letters = {times: a_letter(times=times, source=source) for times in range(9)}
    assert {times for times, letter in letters.items() if not judged(letter, group=group)} == accepted
    assert judged(letters[0], group=group) == ["dead_altered"]


def progress(
    judge: DeadLetterHistory, kind: FrameKind, consumer: str, entries: tuple[Any, ...], group: Group
) -> list[int]:
    return [sequence for sequence, _ in judge.progress(a_frame(kind), Progress(G, consumer, entries), group)]


def test_dead_ack_needs_a_dead_letter() -> None:
    held, judge = a_group(UnackedRange(3, 5, 2, 2)), DeadLetterHistory()
    assert list(judge.take(a_letter(5), held, may_be_older=False)) == []
    assert progress(judge, FrameKind.ACK, "c", ((3, 5, 0),), held) == []
    assert progress(judge, FrameKind.ACK, "c", ((3, 5, DEAD),), held) == [6]
    assert progress(judge, FrameKind.POSITION, "", ((0, 0, 0),), held) == []
    assert progress(judge, FrameKind.ACK, "c", ((3, 5, DEAD),), held) == [5, 6], "moved: what fails anew is a new one"
    assert list(judge.take(a_letter(5), held, may_be_older=False)) == []


def test_deliveries_before_the_log_excuse_dead_acks() -> None:
    held = a_group(UnackedRange(3, -4, 1, 1))
    assert progress(DeadLetterHistory(), FrameKind.ACK, "c", ((3, 4, DEAD),), held) == []
