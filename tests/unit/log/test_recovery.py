"""Core. Recovery of a log after a crash or damage."""

from __future__ import annotations

import contextlib
from random import Random

import pytest

from qmq.errors import CorruptFrame, DiskFailed
from qmq.log import manifest, recovery
from qmq.log.fold import decode_snapshot
from qmq.log.frame import Frame, FrameKind, decode_frames
from qmq.log.memory_disk import MemoryDisk
from qmq.log.recovery import Recovered, recover
from qmq.log.repair import repair
from qmq.log.segments import index_name, log_name, segment_bases, snapshot_name
from qmq.types import Epoch
from tests.support.effort import every
from tests.unit.log.logs import Copy, a_history, fold_of

SEGMENT = f"log/{0:020d}.log"
SIZE = 16 * 1024


@pytest.mark.parametrize("bad", range(1, 5))
@pytest.mark.parametrize("missing", [False, True])
def test_snapshots_are_rebuilt_from_earlier_ones(bad, missing):
    copy = Copy.filled(60, tail_bytes=0)
    before, bases = copy.log.state, copy.log.bases
    wanted = {base: copy.disk.read(f"log/{base:020d}.snap", 0, 1 << 20) for base in bases}
    for base in bases[-bad:]:
        if missing:
            copy.disk.remove(f"log/{base:020d}.snap")
        else:
            copy.disk.flip(f"log/{base:020d}.snap", 77)
    assert copy.reopen().state == before and copy.log.damage is None
    made = {base: copy.disk.read(f"log/{base:020d}.snap", 0, 1 << 20) for base in bases}
    assert {b: decode_snapshot(data) for b, data in made.items()} == {b: decode_snapshot(d) for b, d in wanted.items()}
    assert decode_snapshot(made[bases[-1]]) == fold_of(copy.whole()[: bases[-1]])


@pytest.fixture(scope="module")
def segment() -> Copy:
    """Return a log of one segment of 16 KiB, full except for some zeros."""
    copy = Copy.begun(segment_bytes=SIZE, tail_bytes=0)
    while copy.log.end < SIZE - 1200:
        copy.messages("a", "b", size=500)
    copy.flush()
    return copy


def borders(copy: Copy) -> list[int]:
    chunk = copy.log.stored.read(0, copy.log.end, 1 << 20)
    return [0, *(frame.end for frame in chunk.frames)]


def recovered_after(copy: Copy, change) -> tuple[Recovered, MemoryDisk]:
    image = copy.disk.copy()
    change(image)
    return recover(image), image


def check_flip(copy: Copy, bit: int, ends: list[int], data: bytes) -> None:
    found, image = recovered_after(copy, lambda image: image.flip(SEGMENT, bit))
    border = max(end for end in ends if end <= bit // 8) if bit // 8 < ends[-1] else ends[-1]
    assert found.state.end == border and image.read(SEGMENT, 0, border) == data[:border], "the true prefix"
    if border < ends[-2]:
        assert found.damage is not None and found.damage[:2] == (border, ends[ends.index(border) + 1]), bit
        assert image.size(SEGMENT) == SIZE and image.names("quarantine") == [], "damage stays in place (W4)"
    else:
        assert found.damage is None and found.torn_bytes > 0, "a torn tail is reported"
        assert len(image.names("quarantine")) == 2, "and kept in quarantine"


def test_flipped_header_bits_are_damage_or_torn_tail(segment):
    ends = borders(segment)
    data = segment.whole()
    for begin in (ends[0], ends[1], ends[len(ends) // 2], ends[-2]):
        for bit in range(8 * begin, 8 * (begin + 96), every(11)):
            check_flip(segment, bit, ends, data)


def test_flipped_body_bits_are_damage_or_torn_tail(segment):
    ends, data = borders(segment), segment.whole()
    for at in range(0, SIZE, every(11)):
        if at % 2 or at < 400 or at > ends[-2]:
            check_flip(segment, 8 * at + at // 2 % 8, ends, data)


@pytest.mark.parametrize("rest", ["missing", "zeros"])
def test_cut_at_every_byte_leaves_the_prefix(segment, rest):
    ends, data = borders(segment), segment.whole()
    for size in range(0, ends[-1] + 1, every(11) if rest == "missing" else 5 * every(7)):

        def cut(image: MemoryDisk, size: int = size) -> None:
            image.truncate(SEGMENT, size)
            if rest == "zeros":
                image.write(SEGMENT, size, [bytes(SIZE - size)])
                image.sync(SEGMENT)

        found, image = recovered_after(segment, cut)
        border = max(end for end in ends if len(data[:size].rstrip(b"\0")) >= len(data[:end].rstrip(b"\0")))
        border = border if rest == "zeros" else max(end for end in ends if end <= size)
        assert (found.state.end, found.damage) == (border, None), size
        assert image.read(SEGMENT, 0, border) == data[:border]
        torn = len(data[border:size].rstrip(b"\0"))
        assert found.torn_bytes == torn and bool(image.names("quarantine")) == bool(torn)
        assert torn or rest == "missing" or image.size(SEGMENT) == SIZE, "reserved bytes stay reserved"


@pytest.mark.parametrize("to_border", range(0, 12, 2))
def test_state_and_index_follow_from_the_prefix(to_border):
    """W6, I17: after a cut at any border, they equal a new fold of the remaining frames."""
    copy = Copy(segment_bytes=1500)
    a_history(copy, Random(to_border), 150)
    copy.flush()
    data = copy.whole()
    frames = [frame for frame, _ in decode_frames(data, 0, 0)]
    step = len(frames) // 12
    for frame in reversed(frames[to_border * step // 2 :: 7]):
        copy.log.cut(frame.offset, "test")
        left = data[: frame.offset]
        assert copy.log.state == fold_of(left), f"cut at {frame.offset}"
        for subject in ("a", "b"):
            refs = [(ref.begin, ref.end, ref.offset) for ref in copy.log.frames(subject, 0, 1_000)]
            assert refs == [
                (f.first_sequence, f.first_sequence + f.count, f.offset)
                for f in frames
                if f.end <= len(left) and f.kind == FrameKind.MESSAGES and f.subject == subject
            ]


def test_damaged_frame_hides_no_other_frame():
    """W4: damage in any segment is reported at the start or when it is read; every other frame is served."""
    copy = Copy.filled(60, tail_bytes=0)
    for base in copy.log.bases:
        image = Copy(copy.disk.copy(), tail_bytes=0)
        image.disk.flip(f"log/{base:020d}.log", 8 * 150)
        log = image.reopen()
        sizes = {name: image.disk.size(name) for name in copy.image()}
        assert sizes == {name: copy.disk.size(name) for name in copy.image()}, "nothing is deleted"
        refs = [ref for subject in ("s0", "s1", "s2") for ref in copy.log.frames(subject, 0, 1_000)]
        unreadable = 0
        for ref in refs:
            try:
                assert log.stored.read_bodies([ref]) == copy.log.stored.read_bodies([ref])
            except CorruptFrame as problem:
                assert problem.offset == ref.offset and base <= ref.offset <= base + 150
                unreadable += 1
        assert unreadable <= 1
        assert log.damage is not None or base != copy.log.bases[-1]


def test_stale_bytes_behind_a_cut_stay_hidden():
    """W5: the same batches again, so that their sizes match the old bytes behind them."""
    copy = Copy.begun(segment_bytes=1 << 16)
    for i in range(20):
        copy.messages(f"old {i}")
    copy.flush()
    stale = copy.whole()
    border = [frame.end for frame, _ in decode_frames(stale, 0, 0)][5]
    copy.log.cut(border, "conflict")
    image = copy.disk
    image.write(SEGMENT, border, [stale[border:]])  # a file system that returns old blocks
    image.sync(SEGMENT)
    copy.epoch = Epoch(1, 2)
    copy.messages("new")
    copy.flush()
    log = copy.reopen()
    bodies = b"".join(bytes(body) for _, body in log.stored.read_bodies(log.frames("s", 0, 100)))
    assert b"new" in bodies and b"old 5" not in bodies
    assert log.damage is not None or log.torn_bytes, "stale bytes are reported"


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "cut short"])
def test_missing_or_short_segment_is_repaired(is_gone):
    copy, other = Copy.filled(60, tail_bytes=0), Copy.filled(60, tail_bytes=0)
    base, following = copy.log.bases[1:3]
    begin = base
    if is_gone:
        copy.disk.remove(f"log/{base:020d}.log")
    else:
        begin = copy.log.stored.read(base, following, 1).frames[3].end
        copy.disk.truncate(f"log/{base:020d}.log", begin - base + 50)
    log = copy.reopen()
    assert log.damage is not None and (log.damage.begin, log.damage.end) == (begin, following)
    with pytest.raises(CorruptFrame):
        log.stored.read_bodies(log.frames("s0", 0, 1_000))
    repair(log, other.log.stored.read(begin, following, following - begin).data)
    assert log.damage is None
    for again in (log, copy.reopen()):
        for subject in ("s0", "s1", "s2"):
            assert again.damage is None and again.frames(subject, 0, 1_000) == other.log.frames(subject, 0, 1_000)


def test_log_without_a_beginning_is_set_aside():
    copy = Copy.filled(60, tail_bytes=0)
    while copy.log.bases[0] == 0:
        copy.drop_oldest_segment()
    for base in copy.log.bases:
        copy.disk.flip(f"log/{base:020d}.snap", 99)
    names = set(copy.disk.names("log"))
    first, last = copy.log.bases[0], copy.log.bases[-1]
    log = copy.reopen()
    assert (log.end, log.bases, log.is_empty) == (0, [], True)
    assert set(copy.disk.names(f"quarantine/{first:020d}-{last:020d}-no-beginning-0")) == names


def test_recovering_twice_equals_once():
    copy = Copy.filled(45, tail_bytes=0)
    for seed in range(60):
        rng = Random(seed)
        image = Copy(copy.disk.copy(), tail_bytes=0)
        for _ in range(rng.randint(1, 3)):
            name = rng.choice(sorted(image.image()))
            if size := image.disk.size(name):
                if rng.random() < 0.7:
                    image.disk.flip(name, rng.randrange(8 * size))
                else:
                    image.disk.truncate(name, rng.randrange(size))
        first = image.reopen()
        files = image.image()
        again = image.reopen()
        assert (again.state, again.damage, again.bases, image.image()) == (
            first.state,
            first.damage,
            first.bases,
            files,
        ), seed
        assert again.torn_bytes == 0


@pytest.mark.parametrize("frames", [1, 60])
def test_clean_start_writes_nothing(frames):
    copy = Copy(tail_bytes=0)
    copy.reopen()
    assert copy.disk.all_names() == [], "an empty copy stays empty"
    copy.begin_epoch()
    copy.fill(frames)
    state, calls = copy.log.state, copy.disk.calls
    assert copy.reopen().state == state
    assert copy.disk.calls == calls + len(copy.log.bases), "one fsync of each segment"


def test_recovered_frames_survive_a_power_cut():
    """A process that was killed before its fsync wrote them; readers act on them."""
    copy = Copy.filled(60, tail_bytes=0)
    copy.messages("written and not fsynced")
    (step,) = copy.log.take_commit().steps
    copy.disk.write(log_name(step.base), step.offset - step.base, step.buffers)
    end = copy.reopen().end
    copy.disk.crash()
    copy.disk.reopen()
    assert copy.reopen().end == end > step.offset


def test_snapshot_of_another_base_is_ignored():
    copy = Copy.filled(60, tail_bytes=0)
    before, (older, newest) = copy.log.state, copy.log.bases[-2:]
    copy.disk.put(snapshot_name(newest), copy.disk.read(snapshot_name(older), 0, 1 << 20))
    assert copy.reopen().state == before and copy.log.damage is None
    assert decode_snapshot(copy.disk.read(snapshot_name(newest), 0, 1 << 20)).end == newest


def test_replay_rebuilds_a_missing_index():
    """Otherwise the first reader far behind would wait for it."""
    copy = Copy.filled(60, tail_bytes=0)
    closed, newest = copy.log.bases[-2:]
    index = copy.disk.read(index_name(closed), 0, 1 << 20)
    for name in (index_name(closed), snapshot_name(newest)):
        copy.disk.remove(name)
    copy.reopen()
    assert copy.disk.read(index_name(closed), 0, 1 << 20) == index


def test_unlisted_new_segment_is_listed():
    copy = Copy.filled(60, tail_bytes=0)
    bases = list(copy.log.bases)
    manifest.write_manifest(copy.disk, bases[:-1])
    assert copy.reopen().bases == bases == manifest.read_manifest(copy.disk) == segment_bases(copy.disk)


def with_large_frames() -> tuple[Copy, list[Frame]]:
    copy = Copy.begun(segment_bytes=96_400, tail_bytes=0)
    copy.messages("it", "fills", "a segment", size=32_000)
    frames = [copy.messages(f"m{i}", size=size) for i, size in enumerate((100, 20_000, 100, 3000, 3000, 20_000))]
    copy.flush()
    assert copy.log.bases == [0, frames[0].offset]
    return copy, frames


def test_replay_reads_in_chunks(monkeypatch):
    monkeypatch.setattr(recovery, "CHUNK_BYTES", 4096)
    copy, frames = with_large_frames()
    before, sizes, read = copy.log.state, [], copy.disk.read

    def watched(name: str, offset: int, size: int) -> bytes:
        sizes.append(size if name.endswith(".log") else 0)
        return read(name, offset, size)

    monkeypatch.setattr(copy.disk, "read", watched)
    assert copy.reopen().state == before and copy.log.torn_bytes == 0
    assert max(sizes) == frames[-1].end - frames[-1].offset


@pytest.mark.parametrize("left", [50, 100, 5000, -8], ids="{} bytes of it are left".format)
def test_torn_large_frame_is_cut(monkeypatch, left):
    monkeypatch.setattr(recovery, "CHUNK_BYTES", 4096)
    copy, (*_, last) = with_large_frames()
    size = last.offset + left if left > 0 else last.end + left
    torn, base = copy.whole()[last.offset : size].rstrip(b"\0"), copy.log.bases[-1]
    copy.disk.truncate(log_name(base), size - base)
    log = copy.reopen()
    assert (log.end, log.damage, log.torn_bytes) == (last.offset, None, len(torn)) and log.is_tail_cut


@pytest.mark.parametrize("is_zeros", [True, False], ids=["zeros", "no frames"])
@pytest.mark.parametrize("followers", [1, 2])
def test_broken_end_of_a_closed_segment_is_damage(followers, is_zeros):
    """The power failed right after the next segment's file was created; the closed segment was fsynced before."""
    copy, other = Copy.filled(60, tail_bytes=0), Copy.filled(60, tail_bytes=0)
    closed, *newer = copy.log.bases[-1 - followers :]
    for base in newer:
        copy.disk.remove(snapshot_name(base))
        copy.disk.truncate(log_name(base), 0)
    last = copy.log.stored.read(closed, newer[0], 1 << 20).frames[-1]
    if is_zeros:
        copy.disk.write(log_name(closed), last.offset - closed, [bytes(last.end - last.offset)])
    else:
        copy.flip(last.offset + 20)
    bases, log = list(copy.log.bases), copy.reopen()
    assert log.damage is not None and log.damage[:2] == (last.offset, newer[0]) and log.end == last.offset
    assert log.health.is_unreplayed and log.bases == bases and manifest.read_manifest(copy.disk) == bases
    assert not log.is_tail_cut and not copy.disk.names("quarantine"), "nothing was cut"
    repair(log, other.log.stored.read(last.offset, newer[0], 1 << 20).data)
    assert log.end >= newer[0] and copy.whole()[: newer[0]] == other.whole()[: newer[0]]
    assert followers > 1 or log.damage is None


def torn_at_its_end() -> tuple[Copy, Frame]:
    """Return a log with a damaged last frame, and that frame."""
    copy = Copy.filled(60, tail_bytes=0)
    base = copy.log.bases[-1]
    last = copy.log.stored.read(base, copy.log.end, 1 << 20).frames[-1]
    copy.flip(last.offset + 20)
    return copy, last


def test_interrupted_tail_cut_is_completed():
    whole, (torn, last) = Copy.filled(60, tail_bytes=0), torn_at_its_end()
    for call in range(1, 40):
        copy = Copy(tail_bytes=0)
        copy.disk.put_back(torn.disk)
        copy.disk.fail_after(call)
        with contextlib.suppress(DiskFailed):
            copy.reopen()
        copy.disk.heal()
        copy.disk.crash()
        copy.disk.reopen()
        log = copy.reopen()
        assert (log.end, log.bases, log.damage, log.is_tail_cut) == (last.offset, torn.log.bases, None, True), call
        assert copy.whole() == whole.whole()[: last.offset] and manifest.read_manifest(copy.disk) == log.bases
        assert copy.disk.names("quarantine")


def test_segment_with_a_torn_first_frame_continues():
    copy = Copy.filled(60, tail_bytes=0)
    bases = list(copy.log.bases)
    while len(copy.log.bases) == len(bases):
        bases = list(copy.log.bases)
        copy.fill(1)
    bases = list(copy.log.bases)
    copy.disk.flip(log_name(bases[-1]), 8 * 20)
    log = copy.reopen()
    assert (log.end, log.bases, log.damage, log.is_tail_cut) == (bases[-1], bases, None, True)
    copy.fill(1)
    assert copy.reopen().end == copy.log.end > bases[-1] and copy.log.bases == bases


def test_missing_newest_file_is_known_after_crashes():
    whole = Copy.filled(60, tail_bytes=0)
    newest = whole.log.bases[-1]
    whole.disk.remove(log_name(newest))
    for call in range(1, 12):
        copy = Copy(tail_bytes=0)
        copy.disk.put_back(whole.disk)
        copy.disk.fail_after(call)
        with contextlib.suppress(DiskFailed):
            copy.reopen()
        copy.disk.heal()
        copy.disk.crash()
        copy.disk.reopen()
        log = copy.reopen()
        assert log.is_tail_cut and log.end == newest and copy.disk.size(log_name(newest)) == 0, call


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "cut short"])
def test_replay_stops_at_a_short_segment(is_gone):
    """It ends at a frame border, so nothing looks torn, and no later snapshot exists."""
    copy, other = Copy.filled(60, tail_bytes=0), Copy.filled(60, tail_bytes=0)
    base, following = copy.log.bases[1:3]
    border = base if is_gone else copy.log.stored.read(base, following, 1 << 20).frames[3].end
    copy.disk.truncate(log_name(base), border - base)
    if is_gone:
        copy.disk.remove(log_name(base))
    for newer in copy.log.bases[2:]:
        copy.disk.remove(snapshot_name(newer))
    log = copy.reopen()
    assert log.health.is_unreplayed and log.damage[:2] == (border, following) and log.end == border
    assert not log.is_tail_cut
    repair(log, other.log.stored.read(border, following, 1 << 20).data)
    assert log.damage is None and log.state == other.log.state and copy.image() == other.image()


def test_replay_skips_zeros_behind_a_segment():
    """A crash may leave a part of the reserved bytes."""
    copy = Copy.filled(60, tail_bytes=0)
    before = copy.log.state
    for base in copy.log.bases[1:]:
        copy.disk.remove(snapshot_name(base))
    name = log_name(copy.log.bases[0])
    copy.disk.write(name, copy.disk.size(name), [bytes(80)])
    assert copy.reopen().state == before and copy.log.damage is None and copy.log.torn_bytes == 0


def test_damaged_oldest_snapshot_has_no_chain():
    """Repair and audit ask for that chain, and need only the frames."""
    copy = Copy.filled(60, tail_bytes=0)
    copy.drop_oldest_segment()
    first = copy.log.bases[0]
    chain = copy.log.stored.start_chain()
    assert chain is not None and copy.log.chain_is(first, chain)
    copy.disk.flip(snapshot_name(first), 99)
    assert copy.log.stored.start_chain() is None
