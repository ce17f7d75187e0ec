"""Core. The manifest lists the segments of a copy: any missing file is damage."""

from __future__ import annotations

import contextlib
from random import Random

import pytest

from qmq.errors import DiskFailed
from qmq.log import manifest
from qmq.log.frame import FrameKind
from qmq.log.repair import repair
from qmq.log.retention import RetentionDecision, encode_retention
from qmq.log.segments import index_name, log_name, segment_bases, snapshot_name
from tests.unit.log.logs import Copy


def repair_all(copy: Copy, whole: bytes) -> None:
    """Repair all damage, one range at a time, from the other copy's bytes."""
    for _ in range(20):
        if copy.log.damage is None:
            return
        repair(copy.log, whole[copy.log.damage.begin : copy.log.damage.end])
    raise AssertionError(copy.log.damage)


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("with_what", [(), (index_name,), (index_name, snapshot_name)])
def test_missing_segment_file_is_damage(position, with_what):
    copy = Copy.filled(60, tail_bytes=0)
    whole, image, bases = copy.whole(), copy.image(), list(copy.log.bases)
    for name in (log_name, *with_what):
        copy.disk.remove(name(bases[position]))
    log = copy.reopen()
    assert log.damage is not None and log.damage[:2] == (bases[position], bases[position + 1])
    assert log.bases == bases and log.start == 0 and log.end == len(whole) and not log.is_tail_cut
    repair_all(copy, whole)
    assert copy.whole() == whole
    copy.log.frames("s1", 0, 1000)
    assert copy.reopen().damage is None and copy.log.bases == bases
    assert copy.image().items() >= {k: v for k, v in image.items() if not k.endswith(".snap")}.items()


def test_missing_manifest_is_rebuilt():
    copy = Copy.filled(60, tail_bytes=0)
    copy.disk.remove(manifest.NAME)
    copy.reopen()
    assert manifest.read_manifest(copy.disk) == copy.log.bases == segment_bases(copy.disk)


def test_damaged_manifest_is_rebuilt():
    copy = Copy.filled(60, tail_bytes=0)
    for bit in range(0, 8 * copy.disk.size(manifest.NAME), 7):
        copy.disk.flip(manifest.NAME, bit)
        copy.reopen()
        assert manifest.read_manifest(copy.disk) == copy.log.bases and copy.log.damage is None
    assert copy.disk.names("quarantine/00000000000000000000-00000000000000000000-manifest-damaged-0") == ["manifest"]


def test_manifest_follows_every_change():
    copy = Copy.filled(60, tail_bytes=0)
    log = copy.log

    def follows() -> bool:
        return manifest.read_manifest(copy.disk) == log.bases == segment_bases(copy.disk)

    assert follows()
    copy.drop_oldest_segment()
    assert follows()
    log.set_aside_oldest_segment("test")
    copy.flush()
    assert follows()
    base, _, snapshot = log.stored.seed_start()
    log.cut(log.bases[-2], "test")
    assert follows()
    log.seed(base, snapshot, "test")
    assert follows() and log.bases == [base]
    log.set_aside("test")
    assert log.bases == [] and not copy.disk.has(manifest.NAME)
    copy.begin_epoch()
    copy.flush()
    assert follows()


@pytest.mark.parametrize("agreed", [True, False])
def test_interrupted_deletion_is_whole_or_nothing(agreed):
    """Segments without an agreed deletion are set aside."""
    for call in range(1, 14):
        copy = Copy.filled(30, tail_bytes=0)
        bases = list(copy.log.bases)
        start = bases[1] if agreed else 0
        copy.append(FrameKind.RETENTION, "", encode_retention(RetentionDecision(start, "", {}, {})))
        copy.flush()
        copy.disk.fail_after(call)
        try:
            copy.drop_oldest_segment()
        except Exception:
            copy.disk.heal()
        copy.disk.heal()
        copy.disk.crash()
        is_there = copy.disk.has(log_name(bases[0]))
        log = copy.reopen()
        assert log.damage is None and log.bases in (bases, bases[1:])
        assert segment_bases(copy.disk) == log.bases == manifest.read_manifest(copy.disk)
        kept_aside = [name for name in copy.disk.all_names() if "not-listed" in name and name.endswith(".log")]
        assert bool(kept_aside) == (is_there and not agreed and log.bases != bases), call
        left = {name(bases[0]) for name in (log_name, index_name, snapshot_name)} & set(copy.disk.all_names())
        assert bool(left) == (log.bases == bases)


def test_empty_manifest_drops_no_file():
    copy = Copy.filled(60, tail_bytes=0)
    bases = list(copy.log.bases)
    manifest.write_manifest(copy.disk, [])
    assert copy.reopen().bases == bases == manifest.read_manifest(copy.disk) and copy.log.damage is None


@pytest.mark.parametrize("listed", [[8, 0], [0, 0]])
def test_manifest_out_of_order_is_refused(listed):
    with pytest.raises(ValueError, match="not ascending"):
        manifest.decode_manifest(manifest.encode_manifest(listed))


def test_manifest_of_a_roll_omits_deleted_segments():
    """A listed file that is missing would be damage at the next start."""
    copy = Copy.filled(60, tail_bytes=0)
    segments = len(copy.log.bases)
    while len(copy.log.bases) == segments:
        copy.messages("m", size=100)
    rolling = copy.log.take_commit()
    copy.log.drop_oldest_segment()
    copy.log.perform(rolling)
    copy.log.flushed(rolling)
    copy.flush()
    assert manifest.read_manifest(copy.disk) == copy.log.bases == segment_bases(copy.disk)
    assert copy.reopen().damage is None


def test_crash_during_a_deletion_damages_nothing():
    """Frames before and after the decision used to be two writes. A crash that kept only the second one was damage, and
    the copy was no master without the other copy.
    """
    plain = Copy.filled(60, tail_bytes=0)
    before = plain.disk.calls
    go_on(plain)
    for call in range(1, plain.disk.calls - before + 2):
        for luck in range(8):
            copy = Copy.filled(60, tail_bytes=0)
            copy.disk.fail_after(call)
            with contextlib.suppress(DiskFailed):
                go_on(copy)
            copy.disk.heal()
            copy.disk.crash(Random(luck))
            assert copy.reopen().damage is None, (call, luck)


def go_on(copy: Copy) -> None:
    """Write, delete and write in one commit."""
    copy.messages("a")
    copy.log.drop_oldest_segment()
    copy.messages("b")
    copy.flush()


def test_missing_closed_segments_are_repaired_in_turn():
    copy = Copy.filled(60, tail_bytes=0)
    whole, bases = copy.whole(), list(copy.log.bases)
    for base in bases[:-1]:
        copy.disk.remove(log_name(base))
    copy.reopen()
    repair_all(copy, whole)
    assert copy.whole() == whole and copy.reopen().damage is None
