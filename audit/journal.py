"""Shell. Check of the producers' journal against all copies: equal logs can all lack an acknowledged message.

`audit.promises` judges. The audit has compared the copies before: where they are equal, one of them is read for all.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from qmq.audit.copies import CannotRead, open_copy
from qmq.audit.data_source import Part, TableReader, walks
from qmq.audit.derived import read_snapshot
from qmq.audit.executors import Executors
from qmq.audit.facts import ALL, cut
from qmq.audit.findings import MORE, UNREAD, Row
from qmq.audit.messages import Messages
from qmq.audit.plan import Fact
from qmq.audit.promises import COUNTS, LINES, Due, Line, Promise, Stored, block_key, judge_blocks
from qmq.audit.results import Group, Result, Sequences
from qmq.audit.selection import PIECE_BYTES, split_range
from qmq.audit.walk import Window
from qmq.ledger import PROVEN, Ledger
from qmq.log.frame import FrameKind


def due_of_logs(group: Group, result: Result, subjects: Mapping[str, Mapping[str, Sequences]]) -> Due:
    """Return the due messages of each copy: those that its retention cannot have deleted."""
    known = {name: first_sequences(place, result.logs[name].start) for name, place in group.places.items()}
    if None not in known.values():
        return Due({name: found or {} for name, found in known.items()}, are_all=True)
    firsts = {
        name: {subject: range.first for subject, range in rows.items() if range.first is not None}
        for name, rows in subjects.items()
    }
    return Due(firsts, are_all=False)


def due_since(ledger: Ledger, group: Group, result: Result) -> Due | None:
    """Return the due messages that no earlier run compared, or None if they are unknown.

    The last two runs must have compared the journal and found nothing. Messages from the end of the first of them on
    are due. A producer writes a line once its message is acknowledged, perhaps after the audit has read the journal.
    """
    last = ledger.newest(group.name, 2) if ledger.path(group.name).exists() else []
    if len(last) < 2 or any(entry.verdict != PROVEN or entry.journal is None or not entry.verified for entry in last):
        return None
    before, _ = last
    if result.start > before.verified:
        return None
    return Due(dict.fromkeys(group.places, before.ends), are_all=True, begin=before.verified, run=before.run)


def _files_of(journal: Path) -> list[Path]:
    """Return the journal's files, without hidden ones and those that a writer has not finished."""
    if not journal.is_dir():
        return [journal]
    return sorted(path for path in journal.rglob("*") if path.is_file() and not path.name.startswith((".", "_")))


def check_journal(
    executors: Executors,
    group: Group,
    due: Due,
    ends: Mapping[str, Mapping[str, int]],
    result: Result,
    journal: Path,
    *,
    equal_until: int,
) -> None:
    """Look for every due message of the journal in all copies, and add findings to `result`.

    Args:
        ends: end of each subject by copy when the copies were frozen.
        equal_until: offset up to which the audit found the copies equal.

    Raises:
        CannotRead: the journal or a copy cannot be read; more lines lack a message than crashes explain.
    """
    if not journal.exists():
        raise CannotRead(f"journal {journal}: there is no such file or folder")
    files = _files_of(journal)
    sizes = {path: path.stat().st_size for path in files}
    tasks: list[Step] = [
        LinesStep(str(path), begin, end, group.name)
        for path, size in sizes.items()
        for begin, end in split_range(0, size, PIECE_BYTES)
    ]
    tasks += _messages_steps(group, due, result, equal_until)
    size = sum(sizes.values()) + sum(log.end - max(log.start, due.begin) for log in result.logs.values())
    judge = partial(judge_blocks, Promise(tuple(group.places), due, ends, group.min_copies))
    counts, findings = Counter[str](), list[Row]()
    for _, _, kind, payload, _ in executors.of(size).fold([[task] for task in tasks], _read, [judge]):
        row = json.loads(payload)
        if kind == UNREAD:
            raise CannotRead(row["text"])
        if kind == COUNTS:
            counts.update(row)
        elif kind == MORE:
            for what, times in row.items():
                result.count(what, times)
        else:
            findings.append(row)
    if counts["broken"] > (len(files) if journal.is_dir() else 0):  # a crash tears the last line of a file
        raise CannotRead(f"journal {journal}: {counts['broken']} lines lack subject, sequence or id")
    result.journal = counts["whole"]
    result.take(sorted(findings, key=itemgetter("subject", "sequence")))
    older = counts["older"]
    if older and due.run:
        result.notes.append(f"{older} of the journal's messages were compared by {due.run} or earlier")
    elif older:
        result.notes.append(
            f"{older} of the journal's messages may be older than the copies' logs, and are not compared"
        )


class LinesStep(NamedTuple):
    """The lines of a journal file that begin in `[begin, end)`, for one broker group."""

    path: str
    begin: int
    end: int
    group: str


class MessagesStep(NamedTuple):
    """A part of one copy's log. Its frames in `[equal_from, equal_until)` count for all copies."""

    copy: str
    part: Part
    equal_from: int
    equal_until: int


Step = LinesStep | MessagesStep


def _messages_steps(group: Group, due: Due, result: Result, equal_until: int) -> Iterator[MessagesStep]:
    """Yield the parts to read: one copy whole, the slave's if it begins as early, and others from `equal_until` on."""
    whole = min(reversed(group.places), key=lambda name: result.logs[name].start)
    for name, place in group.places.items():
        begin = due.begin if name == whole else max(due.begin, equal_until)
        for part in TableReader({**place, "begin": str(begin)}, []).partitions():
            assert isinstance(part, Part)
            if part.extents:
                yield MessagesStep(name, part, result.start, equal_until)


def _read(task: Sequence[Step]) -> Iterator[Fact]:
    for step in task:
        try:
            yield from _lines_of(step) if isinstance(step, LinesStep) else _messages_of(step)
        except OSError as error:
            yield 0, UNREAD, 0, ALL, pickle.dumps(f"{error.filename}: {error.strerror}", 5)
        except CannotRead as error:
            yield 0, UNREAD, 0, ALL, pickle.dumps(str(error), 5)


def _lines_of(step: LinesStep) -> Iterator[Fact]:
    blocks: defaultdict[str, list[Line]] = defaultdict(list)
    counts = Counter[str]()
    for text in _texts_in(step):
        line = _line(text)
        if line.get("group", step.group) in (None, step.group):
            subject, sequence, id = line.get("subject"), line.get("sequence"), line.get("id")
            if type(subject) is str and type(sequence) is int and type(id) is str:
                blocks[block_key(subject, sequence)].append((sequence, id, line.get("hash")))
                counts["whole"] += 1
            else:
                counts["broken"] += bool(text.strip())
    yield 0, COUNTS, LINES, ALL, pickle.dumps(counts, 5)
    for key, lines in blocks.items():
        yield 0, key, LINES, ALL, pickle.dumps(lines, 5)


def _texts_in(step: LinesStep) -> Iterator[bytes]:
    with open(step.path, "rb") as file:
        if step.begin:
            file.seek(step.begin - 1)
            file.readline()
        at = file.tell()
        while at < step.end and (text := file.readline()):
            yield text
            at += len(text)


def _line(text: bytes) -> Row:
    """Return the fields of a line; none if it is no JSON object."""
    try:
        line = json.loads(str(text, "utf-8"))
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def _messages_of(step: MessagesStep) -> Iterator[Fact]:
    for walk in walks(step.part):
        for window in walk.windows():
            blocks: defaultdict[tuple[str, str], list[Stored]] = defaultdict(list)
            for copy, subject, stored in _stored_in(window, step):
                for key, messages in stored.by_block(subject):
                    blocks[key, copy].append(messages)
            for (key, copy), of_block in blocks.items():
                yield 0, key, window.offset, copy, pickle.dumps(of_block, 5)


def _stored_in(window: Window, step: MessagesStep) -> Iterator[tuple[str, str, Stored]]:
    """Yield (copy, subject, messages) of each frame with an intact batch."""
    batches = [
        frame for frame in window.frames if frame.kind == FrameKind.MESSAGES and frame.offset not in window.damaged
    ]
    frames, begins, ends = cut(window, batches, lambda problem: None)
    if frames:
        for frame, ids, contents in Messages(window, frames, begins, ends).contents():
            copy = ALL if step.equal_from <= frame.offset < step.equal_until else step.copy
            yield copy, frame.subject, Stored(frame.first_sequence, ids, contents)


def first_sequences(place: Mapping[str, str], start: int) -> dict[str, int] | None:
    """Return the first sequence of each subject older than a copy's log, from the snapshot at its start; None without
    one.
    """
    if start == 0:
        return {}
    try:
        with closing(open_copy(place)) as copy:
            state, _ = read_snapshot(copy.derived(start).snapshot, start)
    except OSError:
        return None
    return state.next_sequence if state is not None else None
