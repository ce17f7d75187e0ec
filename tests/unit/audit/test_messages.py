"""Shell. Findings for invalid messages and headers with valid CRCs: exactly those."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from itertools import chain, combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qmq.audit.copies import PathCopy
from qmq.audit.dead_letters import check_dead_letters
from qmq.audit.facts import Gathering, PieceFacts
from qmq.audit.findings import FINDING, JudgeRow, finding
from qmq.audit.messages import STORED, TAGGED
from qmq.audit.results import GroupAnswer
from qmq.audit.rules import LogJudge, SubjectJudge
from qmq.audit.selection import split_range
from qmq.audit.walk import Walk
from qmq.codec import delayed_encoder, encode_labels, encode_message, join_batch, label_of
from qmq.log.frame import FrameKind, label_flags
from qmq.message import Message
from qmq.types import Epoch
from tests.unit.audit.divergences import TWO_SIDED, Plant
from tests.unit.audit.forged import forged, write_world
from tests.unit.audit.logs import BEGIN_MS, LogWriter

WITH_ALL_GROUPS = {"batch_twice", "id_twice"}
"""Return the findings over all pieces."""
NOW_MS = 1_800_000_000_000


def facts_of(data: Path, begin: int = 0, end: int | None = None, **options: Any) -> PieceFacts:
    with closing(PathCopy(data)) as copy:
        gathering = Gathering(NOW_MS, **options)
        for window in Walk(copy, begin, end or copy.describe().end, is_start=begin == 0).windows():
            gathering.take(window)
    return gathering.facts()


def problems(data: Path) -> list[tuple[str, int, int | None, str | None]]:
    return [(fact["what"], fact["offset"], fact["first"], fact["id"]) for fact in facts_of(data).problems]


def test_log_as_brokers_write_it_has_no_problem(tmp_path: Path) -> None:
    write_world(tmp_path)
    assert problems(tmp_path) == []


def judged(data: Path) -> set[tuple[str, int, int | None]]:
    """Return the findings of the reader and of the judges, fed with facts in Spark's order."""
    facts = facts_of(data)
    group, answer = LogJudge(NOW_MS, [0], 0), GroupAnswer(("master",))
    rows = [*group.take(0, facts), *group.finish(), *of_letters(data, facts)]
    for subject, of in facts.subjects.items():
        judge = SubjectJudge(subject, 0, None, 1 << 62)
        rows += [*judge.take(0, of), *judge.finish()]
    for row in rows:
        answer.take("master", row.kind, row.row)
    return {(row["what"], row["offset"], row["sequence"]) for row in answer.findings()[0]}


def of_letters(data: Path, facts: PieceFacts) -> list[JudgeRow]:
    with closing(PathCopy(data)) as copy:
        found = check_dead_letters(copy, copy.bases, facts.letters())
        return [finding(row.pop("what"), row.pop("text"), **row) for row in found]


@pytest.mark.parametrize("plant", TWO_SIDED.values(), ids=TWO_SIDED.keys())
def test_only_the_invalid_message_is_a_finding(tmp_path: Path, plant: Plant) -> None:
    write_world(tmp_path)
    assert judged(tmp_path) == set()
    with forged(tmp_path) as frames:
        expected = plant(frames)
    due = {(what, frame.at, sequence) for what, frame, sequence in expected if what not in WITH_ALL_GROUPS}
    assert judged(tmp_path) == due


def test_message_findings_carry_the_id(tmp_path: Path) -> None:
    plants = [TWO_SIDED[name] for name in ("of another subject", "labels that are zero", "a message that is no UTF-8")]
    write_world(tmp_path)
    with forged(tmp_path) as frames:
        expected = [found for plant in plants for found in plant(frames)]
    ids = {identity for what, _, _, identity in problems(tmp_path)}
    assert ids == {f"{frame.subject}-{sequence}" for _, frame, sequence in expected}


def test_invalid_text_is_found_in_any_frame(tmp_path: Path) -> None:
    for bad in range(8):
        log, sequence = LogWriter(tmp_path / str(bad)), 0
        for subject in ("s", "a.longer.subject", "s", "t"):
            whole = [encode_message(Message(subject, {"text": "xxxx"}, id=f"m{at}"), 1) for at in range(2)]
            if sequence <= bad < sequence + 2:
                whole[bad - sequence] = whole[bad - sequence].replace(b"xxxx", b"xx\xffx")
            log.messages(subject, whole)
            sequence += 2
        log.close()
        found = [(what, offset, identity) for what, offset, _, identity in problems(tmp_path / str(bad))]
        assert found == [("undecodable", log.frames[bad // 2].offset, f"m{bad % 2}")], bad


@pytest.mark.parametrize("body", [b"plain", b"\xff\xfe\x80", "Öl".encode()], ids=["ascii", "binary", "utf-8"])
def test_bodies_hide_no_invalid_text(tmp_path: Path, body: bytes) -> None:
    """A body is no text: it may have any bytes."""
    log = LogWriter(tmp_path)
    whole = [encode_message(Message("s", {"text": "xxxx"}, id=f"m{at}", body=body), 1) for at in range(3)]
    log.messages("s", whole)
    log.messages("s", [whole[0], whole[1].replace(b"xxxx", b"xx\xffx"), whole[2]])
    log.close()
    assert problems(tmp_path) == [("undecodable", log.frames[1].offset, 4, "m1")]


def test_message_of_another_subject_is_found(tmp_path: Path) -> None:
    log, subject = LogWriter(tmp_path), "order.changed.by.others"
    for at in range(len(subject)):
        other = subject[:at] + "x" + subject[at + 1 :]
        log.messages(subject, [encode_message(Message(name, id=f"m{at}"), 1) for name in (subject, other)])
    log.close()
    assert [(what, sequence) for what, _, sequence, _ in problems(tmp_path)] == [
        ("foreign", 2 * at + 1) for at in range(len(subject))
    ]


@pytest.mark.parametrize(
    "message",
    [
        encode_message(Message("s", {"text": "жизнь", "long": "ü" * 300}, id="é", tags=("çà",)), 1 << 40),
        encode_message(Message("s", {}, id="m", order_key="customer 7"), 1),
        encode_message(Message("s", {f"n{at}": "" for at in range(300)}, id="m" * 100), 1),
        delayed_encoder("s", 1, 1 << 40)(Message("s", {"t": "x"}, id="m", tags=("a", "b"))),
    ],
    ids=["not English", "order key", "many properties", "delayed"],
)
def test_any_legal_message_has_no_problem(tmp_path: Path, message: bytes) -> None:
    log = LogWriter.begun(tmp_path)
    log.messages("s", [message])
    log.messages("%DEAD_RETRY%s%g", [message])
    log.messages("s", [message] * 3, labels=[label_of(("a", "b"), None)] * 3) if message[0] == 6 else None
    log.close()
    assert [problem for problem in problems(tmp_path) if problem[0] != "id_twice"] == []


def test_order_key_counts_in_its_label(tmp_path: Path) -> None:
    log = LogWriter.begun(tmp_path)
    messages = [encode_message(Message("s", {"a": "b"}, id=f"m{at}", order_key="k", tags=("t",)), 1) for at in range(2)]
    labels = [label_of(("t",), "k"), label_of(("t",), "other")]
    log.frame(FrameKind.MESSAGES, "s", join_batch(messages) + encode_labels(labels), count=2, flags=label_flags(labels))
    log.close()
    assert [(what, sequence, identity) for what, _, sequence, identity in problems(tmp_path)] == [("labels", 1, "m1")]


def test_duplicate_keys_differ_by_producer_and_subject(tmp_path: Path) -> None:
    log = LogWriter.begun(tmp_path)
    for subject in ("a", "b", "a"):
        log.batch(subject, 3, first=0)
    log.close()
    ((_, *stored),) = facts_of(tmp_path, wants_stored=True).stored
    batches, ids = (np.frombuffer(packed, STORED) for packed in stored)
    assert len(set(batches["key"])) == 3, "LogWriter numbers each batch anew"
    assert list(ids["key"][:3]) == list(ids["key"][6:]) and not set(ids["key"][:3]) & set(ids["key"][3:6])
    assert list(ids["place"]) == [0, 1, 2] * 3
    assert facts_of(tmp_path).stored == []


def test_hash_of_an_id_is_independent_of_others(tmp_path: Path) -> None:
    log = LogWriter.begun(tmp_path)
    frames = [
        log.messages("s", [encode_message(Message("s", id=id_), 1) for id_ in ids])
        for ids in (["short"], ["short", "y" * 60, "short\0"])
    ]
    log.close()
    keys = [
        np.frombuffer(facts_of(tmp_path, begin, end, wants_stored=True).stored[0][2], STORED)["key"].tolist()
        for begin, end in ((0, frames[1].offset), (frames[1].offset, None))
    ]
    assert keys[1][0] == keys[0][0]
    assert len(set(keys[1])) == 3


def test_tagged_messages_are_facts(tmp_path: Path) -> None:
    log = LogWriter.begun(tmp_path)
    encode = delayed_encoder("s", 1, 1_700_000_000_123)
    log.messages("s", [encode(Message("s", {}, id="m", tags=tags)) for tags in (("t",), ("t",), (), ("u",))])
    log.close()
    facts = {fact["kind"]: fact for fact in facts_of(tmp_path).subjects["s"][0]}
    tagged = np.frombuffer(facts["tags"]["body"], TAGGED)
    assert list(tagged["sequence"]) == [0, 1, 3]
    assert tagged["tags"][0] == tagged["tags"][1] != tagged["tags"][2]


def test_dead_letter_in_chosen_subject_keeps_its_subject(tmp_path: Path) -> None:
    log, message = LogWriter(tmp_path), encode_message(Message("s", id="m1"), 0)
    log.dead_letter("s", "g", 0, message, 2, to="t")
    plain = log.messages("t", [message])
    assert [(what, offset) for what, offset, *_ in problems(log.close())] == [("foreign", plain.offset)]


# Pieces: a problem across their borders is reported once, at the same frame.


def test_older_epoch_is_named_once_over_all_pieces(tmp_path: Path) -> None:
    log = LogWriter.begun(tmp_path, epoch=Epoch(2, 1))
    for turn in range(30):
        if turn == 10:
            log.epoch = Epoch(1, 9)
        log.batch("s", 4)
    log.close()
    assert over_pieces(tmp_path, split_range(0, log.end, 2048)) == [("epoch", log.frames[11].offset)]


def over_pieces(data: Path, pieces: Iterable[tuple[int, int]]) -> list[tuple[str, int]]:
    group, found = LogJudge(NOW_MS, [0], 0), []
    for begin, end in pieces:
        found += group.take(begin, facts_of(data, begin, end))
    found += group.finish()
    return [(found_row.row["what"], found_row.row["offset"]) for found_row in found if found_row.kind == FINDING]


@pytest.mark.parametrize("apart_ms", [7_200_000, -7_200_000], ids=["ahead", "back"])
def test_wrong_time_is_found_across_any_borders(tmp_path: Path, apart_ms: int) -> None:
    log, frames, wrong = LogWriter(tmp_path), 8, 4
    for number in range(frames):
        log.timestamp_ms = BEGIN_MS + 1000 * number + (apart_ms if number == wrong else 0)
        if number:
            log.batch("s", 1)
        else:
            log.mastership(Epoch(2, 1))
    log.close()
    for begins in chain.from_iterable(combinations(range(1, frames), size) for size in range(frames)):
        borders = [0, *(log.frames[number].offset for number in begins), log.end]
        assert over_pieces(tmp_path, pairwise(borders)) == [("time", log.frames[wrong].offset)], begins


@pytest.mark.parametrize("moves_on", [False, True])
def test_still_watermark_is_named_once_for_any_borders(tmp_path: Path, moves_on: bool) -> None:
    log, still = LogWriter(tmp_path), range(3, 12)
    log.mastership(Epoch(2, 1))
    for number in range(14):
        log.timestamp_ms = BEGIN_MS + 60_000 * number
        log.watermark = log.frames[3].offset if number in still or (number > 3 and not moves_on) else None
        log.batch("s", 1)
    log.close()
    for begins in combinations(range(1, len(log.frames)), 3):
        borders = [0, *(log.frames[number].offset for number in begins), log.end]
        assert over_pieces(tmp_path, pairwise(borders)) == [("watermark", log.frames[3].offset)], begins
