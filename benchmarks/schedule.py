"""Shell. `python -m benchmarks.schedule`: cost of the delay server's schedule, alone in one process.

Work on the delay server's loop is timed apart from work on its threads. Messages have 200 bytes and come in frames of
100.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np

from qmq.codec import encode_message, join_batch
from qmq.delayserver.pending_queue import Leftovers, PendingQueue
from qmq.delayserver.schedule import Records, Schedule, id_hash
from qmq.delayserver.wheel import Wheel
from qmq.log.delay_frames import Outcome, Place, encode_dispatch, encode_places, encode_settled
from qmq.log.disk import RealDisk
from qmq.log.frame import HEADER_BYTES, Frame, FrameKind
from qmq.message import Message
from qmq.types import Epoch

HOUR_MS = 3_600_000
SUBJECT = "delayed.order"
BATCH = 100
CANCELS = 1000
BEGIN_MS = 1_800_000_000_000 // HOUR_MS * HOUR_MS
LOG_START = 4096
ID = "{:012d}"
T = TypeVar("T")


class Frames:
    """Makes consecutive frames of a log, without valid chains and checksums."""

    def __init__(self, begin_ms: int, span_ms: int, *, first: int = 0, end: int = LOG_START) -> None:
        self._begin_ms = begin_ms
        self._span_ms = span_ms
        self.count = first
        self.end = end
        self._rng = np.random.default_rng(first + 1)
        self._message = self._one()
        self._id_at = self._message.index(ID.format(0).encode())

    def _one(self) -> bytes:
        empty = encode_message(Message(SUBJECT, {"text": ""}, id=ID.format(0)), 1)
        data = encode_message(Message(SUBJECT, {"text": "x" * (200 - len(empty))}, id=ID.format(0)), 1)
        return bytes([data[0] | 2]) + data[1:]

    def messages(self) -> tuple[Frame, bytes]:
        """Make a frame of 100 messages, each with its own id and due time."""
        batch = np.tile(np.frombuffer(self._message, np.uint8), (BATCH, 1))
        dues = self._rng.integers(self._begin_ms, self._begin_ms + self._span_ms, BATCH)
        batch[:, 9:17] = dues.astype(">i8").view(np.uint8).reshape(BATCH, 8)
        ids = "".join(map(ID.format, range(self.count, self.count + BATCH))).encode()
        batch[:, self._id_at : self._id_at + 12] = np.frombuffer(ids, np.uint8).reshape(BATCH, 12)
        self.count += BATCH
        return self._frame(FrameKind.MESSAGES, join_batch([bytes(message) for message in batch]), BATCH)

    def dispatch(self, places: list[Place], batch: int) -> tuple[Frame, bytes]:
        return self._frame(FrameKind.DISPATCH, encode_dispatch("group", encode_places(places)), len(places), batch)

    def cancel(self, places: list[Place]) -> tuple[Frame, bytes]:
        return self._frame(FrameKind.CANCEL, encode_places(places), len(places))

    def settled(self, batch: int) -> tuple[Frame, bytes]:
        return self._frame(FrameKind.SETTLED, encode_settled([(1, batch, Outcome.STORED)]), 1)

    def _frame(self, kind: FrameKind, body: bytes, count: int, batch: int = 0) -> tuple[Frame, bytes]:
        body_at = HEADER_BYTES + -(-len(SUBJECT) // 8) * 8
        begin = self.end
        self.end = self.end + body_at + len(body)
        frame = Frame(
            kind, 0, SUBJECT, count, len(body), Epoch(1, 1), begin, 0, 0, 0, 1, batch, 0, 0, body_at, self.end
        )
        return frame, body


class Stopwatch:
    """Sums the time of steps and keeps the longest: in processor time, which other programs disturb least, and by the
    clock.
    """

    def __init__(self) -> None:
        self.total_s = self.cpu_s = self.longest_s = self.slowest_s = 0.0
        self.steps = 0

    def __call__(self, step: Callable[..., T], *arguments: object) -> T:
        began, cpu_began = time.perf_counter(), time.thread_time()
        result = step(*arguments)
        cpu_s = time.thread_time() - cpu_began
        self.steps += 1
        took_s = time.perf_counter() - began
        self.total_s += took_s
        self.slowest_s = max(self.slowest_s, took_s)
        self.cpu_s += cpu_s
        self.longest_s = max(self.longest_s, cpu_s)
        return result


def rss_mb() -> float:
    gc.collect()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


def opened(folder: Path) -> Schedule:
    return Schedule(RealDisk(folder, cached_bytes=None), segment_ms=HOUR_MS, log_start=LOG_START)


def fill(schedule: Schedule, frames: Frames, messages: int) -> tuple[Stopwatch, Stopwatch]:
    """File messages; return the times on the loop and on a thread."""
    loop, thread = Stopwatch(), Stopwatch()
    for _ in range(messages // BATCH):
        entry = frames.messages()
        loop(schedule.file, *entry)
        flush = loop(schedule.take_flush, 0)
        if flush is not None:
            thread(flush.perform)
            schedule.flushed(flush)
    return loop, thread


def save(schedule: Schedule) -> None:
    if (flush := schedule.take_flush(0, stop=True)) is not None:
        flush.perform()
        schedule.flushed(flush)


def far_ahead(folder: Path, messages: int) -> dict[str, float]:
    """Measure messages over 30 days: filing, memory, look-ups, and a restart."""
    before = rss_mb()
    schedule, frames = opened(folder), Frames(BEGIN_MS, 30 * 24 * HOUR_MS)
    loop, thread = fill(schedule, frames, messages)
    figures = {
        "filed_per_cpu_s": messages / loop.cpu_s,
        "filed_per_s": messages / loop.total_s,
        "filed_longest_ms": 1e3 * loop.longest_s,
        "flush_cpu_s_per_million": 1e6 * thread.cpu_s / messages,
        "growth_mb": rss_mb() - before,
        "flush_slowest_s": thread.slowest_s,
    }
    save(schedule)
    for ids in (1, 1000):
        find = schedule.find(SUBJECT, [id_hash(ID.format(i * (messages // ids))) for i in range(ids)], [])
        watch = Stopwatch()
        assert len(watch(find)) >= ids
        figures[f"find_{ids}_s"] = watch.total_s
    later = [frames.messages() for _ in range(1_000_000 // BATCH)]
    del schedule, find
    watch = Stopwatch()
    schedule = watch(lambda: opened(folder))
    assert not schedule.rebuilt and schedule.pending_messages == messages
    figures["open_s"] = watch.total_s
    watch(lambda: [schedule.file(*entry) for entry in later])
    figures["restart_s"] = watch.total_s
    return figures


def one_hour(folder: Path, messages: int) -> dict[str, float]:
    """Measure messages of one hour: loading, leaving the wheel when due, and settling."""
    schedule, frames = opened(folder), Frames(BEGIN_MS, HOUR_MS)
    fill(schedule, frames, messages)
    save(schedule)
    wheel, loop, thread, before = Wheel(), Stopwatch(), Stopwatch(), rss_mb()
    while (piece := loop(schedule.next_piece, BEGIN_MS + 1)) is not None:
        records = thread(piece.read)
        records = loop(schedule.handed, piece, records)
        loop(wheel.add, records)
    assert len(wheel) == messages
    figures = {
        "load_loop_cpu_s": loop.cpu_s,
        "load_thread_cpu_s": thread.cpu_s,
        "load_longest_ms": 1e3 * loop.longest_s,
        "wheel_bytes_per_message": wheel.bytes / messages,
        "loaded_growth_mb": rss_mb() - before,
    }
    take, taken, step_ms = Stopwatch(), 0, 10
    planned, looked_up = Stopwatch(), Stopwatch()
    for step in range(1, 3000):
        due = take(wheel.take, BEGIN_MS + step * step_ms, 100_000)
        if not len(due):
            continue
        taken += len(due)
        dispatch, settled = frames.dispatch(_places(due), step), frames.settled(step)
        if is_planned := step % 2 == 0:  # as on a master; a slave looks up the messages of a frame
            schedule.planned(1, step, due)
        watch = planned if is_planned else looked_up
        watch(schedule.file, *dispatch)
        watch(schedule.file, *settled)
    return figures | {
        "take_cpu_us": 1e6 * take.cpu_s / take.steps,
        "take_longest_ms": 1e3 * take.longest_s,
        "messages_per_dispatch": 2 * taken / (planned.steps + looked_up.steps),
        "dispatch_and_settled_cpu_us": 2e6 * planned.cpu_s / planned.steps,
        "dispatch_and_settled_slave_cpu_us": 2e6 * looked_up.cpu_s / looked_up.steps,
        "settle_longest_ms": 1e3 * max(planned.longest_s, looked_up.longest_s),
    }


def campaign(folder: Path, messages: int) -> dict[str, float]:
    """Measure the cancelling of 1,000 messages of one moment, all on the wheel, one by one, by id."""
    schedule, frames = opened(folder), Frames(BEGIN_MS, 1)
    fill(schedule, frames, messages)
    save(schedule)
    wheel = Wheel()
    while (piece := schedule.next_piece(BEGIN_MS + 1)) is not None:
        wheel.add(schedule.handed(piece, piece.read()))
    loop, find = Stopwatch(), Stopwatch()

    def cancel(records: Records) -> None:
        frame, body = frames.cancel(_places(records))
        schedule.decided(frame, records)
        wheel.remove(schedule.file(frame, body).done)

    for number in range(0, messages, messages // CANCELS):
        question = loop(schedule.find, None, [id_hash(ID.format(number))], [], [BEGIN_MS])
        (found,) = find(question.near)
        loop(cancel, found.record.reshape(1))
        loop(lambda: wheel.take(BEGIN_MS - 1, 1))  # a beat
    loop(wheel.__len__)
    together, find_all = Stopwatch(), Stopwatch()
    hashes = [id_hash(ID.format(number + 1)) for number in range(0, messages, messages // CANCELS)]
    question = together(schedule.find, None, hashes, [], [BEGIN_MS])
    records = np.array([found.record for found in find_all(question.near)])
    together(cancel, records)
    together(wheel.__len__)
    assert len(wheel) == messages - 2 * CANCELS
    return {
        "cancel_together_loop_ms": 1e3 * together.cpu_s,
        "cancel_together_longest_ms": 1e3 * together.longest_s,
        "cancel_together_find_ms": 1e3 * find_all.cpu_s,
        "cancel_loop_ms": 1e3 * loop.cpu_s,
        "cancel_longest_ms": 1e3 * loop.longest_s,
        "cancel_find_ms_each": 1e3 * find.cpu_s / find.steps,
        "cancel_find_first_ms": 1e3 * find.longest_s,
    }


class _Host:
    """Reads on request; its time counts as a thread's."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []

    def read(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.jobs.append((job, done))

    def pass_soon(self) -> None: ...


class _Undecided:
    """No frame decides about messages meanwhile."""

    def not_named(self, records: Records) -> Records:
        return records


def leftovers(folder: Path, messages: int, most: int) -> dict[str, float]:
    """Measure due messages of which `most` may be loaded: cutting the queue, and reading the others back, 500 per
    send.
    """
    schedule, frames, host = opened(folder), Frames(BEGIN_MS, 60_000), _Host()
    fill(schedule, frames, messages)
    save(schedule)
    wheel = Wheel()
    while (piece := schedule.next_piece(BEGIN_MS + 1)) is not None:
        wheel.add(schedule.handed(piece, piece.read()))
    queue = PendingQueue(SUBJECT)
    filing = SimpleNamespace(schedule=schedule)
    left = Leftovers(cast(Any, filing), cast(Any, host), cast(Any, _Undecided()), most, lambda _: queue.count)
    cutting, back, read = Stopwatch(), Stopwatch(), Stopwatch()

    def put(records: Records) -> None:
        if len(records := left.arrived(0, records)):
            queue.put(records, (), lambda _: None)

    def came_due(records: Records) -> None:
        put(records)
        left.make_room([(0, queue)])

    while len(due := wheel.take(BEGIN_MS + 60_000, 65_536)):
        cutting(came_due, due)
    on_disk, sent = left.messages, 0

    def go_on() -> Records:
        return left.go_on(BEGIN_MS + 60_000, all_taken=True)

    while queue.count or not left.is_empty:
        if queue.count:
            sent += len(queue.take(0, np.arange(min(500, len(queue.pieces[0].records)))))
        left.ran_low(0, queue.count)
        back(put, back(go_on))
        while host.jobs:
            job, done = host.jobs.pop()
            back(done, read(job))
    assert sent == messages, (sent, messages)
    return {
        "leftovers_on_disk": float(on_disk),
        "cut_loop_ms": 1e3 * cutting.cpu_s,
        "cut_longest_ms": 1e3 * cutting.longest_s,
        "back_loop_ms": 1e3 * back.cpu_s,
        "back_longest_ms": 1e3 * back.longest_s,
        "back_reads": float(read.steps),
        "back_read_thread_s": read.cpu_s,
        "back_read_longest_s": read.longest_s,
    }


def _places(records: Records) -> list[Place]:
    return list(zip(records["number"].tolist(), records["due"].tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedule", description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000_000, help="spread over 30 days")
    parser.add_argument("--hour", type=int, default=5_000_000, help="messages of one hour")
    parser.add_argument("--campaign", type=int, default=1_000_000, help="messages of one moment")
    parser.add_argument("--leftovers", type=int, default=1_000_000, help="messages due at once beyond what is loaded")
    parser.add_argument("--only", default="", choices=("", "far", "hour", "campaign", "leftovers"))
    parser.add_argument("--folder", type=Path, default=None, help="where the files go; a temporary one by default")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        figures: dict[str, float] = {}
        if options.only in ("", "far"):
            figures |= far_ahead(folder / "far", options.messages)
        if options.only in ("", "hour"):
            figures |= one_hour(folder / "hour", options.hour)
        if options.only in ("", "campaign"):
            figures |= campaign(folder / "campaign", options.campaign)
        if options.only in ("", "leftovers"):
            most = max(1, options.leftovers // 10)
            figures |= leftovers(folder / "leftovers", options.leftovers + most, most)
    finally:
        shutil.rmtree(folder)
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}, indent=2))


if __name__ == "__main__":
    main()
