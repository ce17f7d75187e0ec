"""Core. A log equals a list of frames under any operations."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qmq.log.frame import FrameKind, decode_frames
from qmq.types import Epoch
from tests.support.effort import examples
from tests.unit.log.logs import Copy, fold_of


class LogAndList(RuleBasedStateMachine):
    """`parts`: the frames' bytes in order; `flushed`: how many are on disk; `dropped`: how many retention dropped;
    `gone`: how many are deleted from disk.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copy = Copy(segment_bytes=1200, tail_bytes=700)
        self.parts: list[bytes] = []
        self.flushed = self.dropped = self.gone = 0
        self.under_way = None
        self.written_when_taken = 0
        self.message_count = 0

    def borders(self) -> list[int]:
        ends = [0]
        for part in self.parts:
            ends.append(ends[-1] + len(part))
        return ends

    def took(self, begin: int) -> None:
        buffers, end, _ = self.copy.log.tail_frames(begin, 1 << 20)
        assert end == self.copy.log.end
        self.parts.append(b"".join(buffers))

    @rule(subject=st.sampled_from("ab"), count=st.integers(1, 3), size=st.integers(0, 300))
    def append(self, subject: str, count: int, size: int) -> None:
        begin = self.copy.log.end
        if not self.parts:
            self.copy.begin_epoch()
        else:
            ids = [f"m{self.message_count + i}" for i in range(count)]
            self.message_count += count
            self.copy.messages(*ids, subject=subject, size=size)
        self.took(begin)

    @rule()
    def promote(self) -> None:
        begin = self.copy.log.end
        self.copy.begin_epoch(Epoch(1, self.copy.epoch.boot + 1))
        self.took(begin)

    @precondition(lambda self: self.under_way is None)
    @rule()
    def take_commit(self) -> None:
        self.under_way, self.written_when_taken = self.copy.log.take_commit(), len(self.parts)
        assert (self.under_way is None) == (self.flushed == len(self.parts) and self.gone == self.dropped)
        self.dropped_when_taken = self.dropped
        if self.under_way is not None:
            assert (self.under_way.end, self.under_way.chain) == (self.copy.log.end, self.copy.log.chain)

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def fsync(self) -> None:
        assert self.copy.log.take_commit() is None
        self.copy.log.perform(self.under_way)
        self.copy.log.flushed(self.under_way)
        self.under_way = None
        self.flushed = self.written_when_taken
        self.gone = self.dropped_when_taken

    @precondition(lambda self: self.under_way is None and self.flushed)
    @rule(choice=st.integers(0, 1 << 30))
    def cut(self, choice: int) -> None:
        low = max(self.dropped, 1)
        keep = low + choice % (len(self.parts) - low + 1)
        self.copy.log.cut(self.borders()[keep], "test")
        if keep < len(self.parts):
            self.flushed = keep
            self.gone = self.dropped
            del self.parts[keep:]

    @precondition(lambda self: self.under_way is None)
    @rule()
    def crash(self) -> None:
        self.copy.disk.crash()
        self.copy.reopen()
        del self.parts[self.flushed :]
        self.dropped = self.gone

    @precondition(lambda self: self.under_way is None and len(self.copy.log.bases) > 1)
    @rule()
    def drop(self) -> None:
        base = self.copy.log.bases[1]
        if base < self.copy.log.flushed_end:  # as broker.retention decides
            self.copy.log.drop_oldest_segment()
            self.dropped = self.borders().index(base)

    @invariant()
    def ends_agree(self) -> None:
        log, ends = self.copy.log, self.borders()
        assert (log.end, log.flushed_end) == (ends[-1], ends[self.flushed])
        assert log.start == ends[self.dropped]
        assert log.state == fold_of(b"".join(self.parts))
        assert log.is_idle == (self.flushed == len(self.parts) and self.gone == self.dropped)

    @invariant()
    def tail_is_bounded_and_holds_all_that_is_not_on_disk(self) -> None:
        log, ends = self.copy.log, self.borders()
        in_tail = []
        for begin, end in zip(ends, ends[1:]):
            found = log.tail_frames(begin, 1)
            if found is not None:
                assert b"".join(found[0]) == self.parts[ends.index(begin)] and found[1] == end
                in_tail.append(end - begin)
            else:
                assert end <= log.flushed_end
        unflushed = ends[-1] - ends[self.flushed]
        if self.under_way is None and not unflushed:
            assert sum(in_tail) <= 700

    @invariant()
    def chains_agree(self) -> None:
        chain, log = 0, self.copy.log
        ends = self.borders()
        for i, part in enumerate(self.parts):
            if i >= self.dropped and (i < self.flushed or log.tail_frames(ends[i], 1)):
                assert log.chain_is(ends[i], chain) and not log.chain_is(ends[i], chain ^ 1)
                assert not log.chain_is(ends[i] + 8, chain)
            ((frame, _),) = decode_frames(part, ends[i], chain)
            chain = frame.chain
        assert log.chain == chain and log.chain_is(log.end, chain)

    @invariant()
    def reads_agree(self) -> None:
        log, ends, at = self.copy.log, self.borders(), self.dropped
        while at < self.flushed:
            chunk = log.stored.read(ends[at], ends[-1], 400)
            upto = ends.index(chunk.end)
            assert at < upto <= self.flushed and chunk.data == b"".join(self.parts[at:upto])
            at = upto

    @invariant()
    def frames_of_a_subject_agree(self) -> None:
        log, ends = self.copy.log, self.borders()
        for subject in "ab":
            wanted = []
            for i, part in enumerate(self.parts):
                ((frame, body),) = decode_frames(part, ends[i], None)
                if i >= self.dropped and frame.kind == FrameKind.MESSAGES and frame.subject == subject:
                    wanted.append((frame, bytes(body), i))
            total = log.state.next_sequence.get(subject, 0)
            for sequence in {0, total // 2, max(total - 1, 0), total}:
                behind = [(f, b, i) for f, b, i in wanted if f.first_sequence + f.count > sequence]
                for most in (1, 2, 1_000):
                    refs = log.frames(subject, sequence, most)
                    assert [(r.begin, r.end, r.offset, r.length) for r in refs] == [
                        (f.first_sequence, f.first_sequence + f.count, f.offset, f.end - f.offset)
                        for f, _, _ in behind[:most]
                    ]
                on_disk = [entry for entry in behind if entry[2] < self.flushed]
                bodies = log.stored.read_bodies(log.frames(subject, sequence, len(on_disk)) if on_disk else [])
                assert [bytes(body) for _, body in bodies] == [body for _, body, _ in on_disk]


TestLogAndList = LogAndList.TestCase
TestLogAndList.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
