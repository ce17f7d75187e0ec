"""Core. The offset on which two copies agree, and the slave's next action."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, product

import pytest

from qmq.errors import Diverged, Fenced, InvalidRequest
from qmq.log.fold import EpochStart
from qmq.log.frame import decode_frames
from qmq.remoting.commands import encode_json
from qmq.replication.agreement import (
    EPOCHS_PROVEN,
    Action,
    Agreement,
    EpochProof,
    Hello,
    Yield,
    agree,
    proofs_of,
)
from qmq.replication.identity import Point
from qmq.types import Epoch
from tests.support.effort import every
from tests.unit.log.logs import Copy

PLAIN = {
    "group": "g1",
    "incarnation": "b",
    "term": 1,
    "boot": 1,
    "epochs": [[1, 1, 0, 0]],
    "start": 0,
    "end": 40,
    "assigned_term": 1,
    "proofs": [[0, 40, 7]],
    "kept_end": 40,
    "point": [1, 1, 40, 5],
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"chain": -1},
        {"chain": 1 << 64},
        {"end": -8},
        {"term": -1},
        {"epochs": [["1", 1, 0, 0]]},
        {"epochs": [[1, 1, 0, -1]]},
        {"epochs": [[1, 1, 0]]},
        {"epochs": [None]},
        {"epochs": 7},
        {"start": "0"},
        {"kept_end": -1},
        {"proofs": [[0, 40]]},
        {"proofs": [[0, -40, 7]]},
        {"point": [1, 1, 40]},
        {"point": [1, 1, 40, "5"]},
    ],
    ids=str,
)
def test_malformed_hello_is_refused(wrong):
    with pytest.raises(InvalidRequest):
        Hello.decode(encode_json(**(PLAIN | {"chain": 5} | wrong)))


def test_hello_survives_encoding():
    hello = Hello.decode(encode_json(**PLAIN, chain=(1 << 64) - 1))
    table, proofs = [EpochStart(Epoch(1, 1), 0, 0)], [EpochProof(0, 40, 7)]
    point = Point(Epoch(1, 1), 40, 5)
    assert hello == Hello("g1", "b", Epoch(1, 1), table, 0, 40, (1 << 64) - 1, 1, proofs, 40, point), (
        "of a version before fills"
    )
    assert Hello.decode(hello.encode()) == hello
    whole = replace(hello, point=None, owner="b:20881", fill_id="b/0", is_whole=True)
    assert Hello.decode(whole.encode()) == whole


@pytest.mark.parametrize(
    "fill_id, is_whole, end, would_be",
    [("b/0", False, 40, True), ("b/0", True, 0, True), ("b/0", True, 40, False), ("", False, 0, False)],
)
def test_incomplete_or_empty_copy_would_be_filled(fill_id, is_whole, end, would_be):
    assert Hello("g1", "b", Epoch(1, 1), [], 0, end, 0, fill_id=fill_id, is_whole=is_whole).would_be_filled is would_be


@pytest.mark.parametrize(
    "term, end, has_it",
    [
        pytest.param(2, 200, True, id="its end"),
        pytest.param(2, 208, False, id="behind its end"),
        pytest.param(1, 100, True, id="the end of an epoch"),
        pytest.param(1, 108, False, id="a newer master wrote there"),
        pytest.param(2, 100, False, id="an older master wrote there"),
        pytest.param(3, 200, False, id="an unknown epoch"),
        pytest.param(3, 20, True, id="retention deleted it"),
    ],
)
def test_hello_covers_points_of_its_own_epochs(term, end, has_it):
    table = [EpochStart(Epoch(1, 1), 0, 0), EpochStart(Epoch(2, 1), 100, 7)]
    assert Hello("g1", "b", Epoch(2, 1), table, 20, 200, 7).has(Point(Epoch(term, 1), end, 7)) is has_it
    assert not Hello("g1", "b", Epoch(2, 1), [], 0, 0, 0).has(Point(Epoch(term, 1), end, 7))


def test_frames_of_a_newer_epoch_are_ahead():
    table = [EpochStart(Epoch(1, 1), 0, 0), EpochStart(Epoch(2, 1), 100, 7)]
    hello = Hello("g1", "b", Epoch(3, 1), table, 20, 200, 7)
    assert hello.is_ahead_of(Epoch(1, 1)) and not hello.is_ahead_of(Epoch(2, 1))
    assert not replace(hello, epochs=[]).is_ahead_of(Epoch(1, 1)), "a known epoch without frames proves nothing"


def history(epochs: tuple[int, ...], *, size: int = 20, drop: int = 0, **changes: int) -> Copy:
    """Return a log with one frame per term; equal terms after equal frames give equal bytes."""
    copy = Copy(**({"segment_bytes": 200} | changes))
    for place, term in enumerate(epochs):
        copy.epoch = Epoch(term, 1)
        copy.messages(f"{place} in {term}", size=size)
    copy.flush()
    for _ in range(drop):
        copy.drop_oldest_segment()
    return copy


def hello_of(copy: Copy, known: Epoch | None = None) -> Hello:
    state = copy.log.state
    return Hello("g1", "b", known or Epoch(3, 1), state.epochs, copy.log.start, state.end, state.chain)


def common_prefix(ours: bytes, theirs: bytes) -> int:
    """Return the length of the longest common prefix of two logs, in whole frames."""
    frames = [frame for frame, _ in decode_frames(ours, 0, 0)]
    return max((f.end for f in frames if ours[: f.end] == theirs[: f.end] and f.end <= len(theirs)), default=0)


HISTORIES = [epochs for n in range(5) for epochs in combinations_with_replacement((1, 2, 3), n)]
LOGS = {epochs: history(epochs) for epochs in HISTORIES}


@pytest.mark.parametrize("has_begun", [False, True])
def test_agreement_is_the_longest_common_prefix(has_begun):
    for ours, theirs in product(HISTORIES, HISTORIES):
        a, b = LOGS[ours], LOGS[theirs]
        common = common_prefix(a.whole(), b.whole())
        agreement = agree(hello_of(b), a.log, Epoch(9, 1), has_begun=has_begun)
        assert agreement.offset == common, (ours, theirs)
        assert a.log.chain_is(common, agreement.chain) and b.log.chain_is(common, agreement.chain)
        gives = b.log.end > common == a.log.end and not has_begun
        assert agreement.action == (Action.RESTORE if gives else Action.FOLLOW)
        assert (agreement.epoch, agreement.master_end) == (Epoch(9, 1), a.log.end)


def test_slave_behind_the_oldest_segment_is_seeded():
    whole, late = LOGS[1, 1, 2, 3], history((1, 1, 2, 3), drop=2)
    base, chain, _ = late.log.stored.seed_start()
    assert 0 < late.log.start == base < late.log.end
    for epochs in HISTORIES:
        slave = LOGS[epochs]
        common = common_prefix(whole.whole(), slave.whole())
        agreement = agree(hello_of(slave), late.log, Epoch(9, 1), has_begun=True)
        if common < late.log.start:
            assert (agreement.action, agreement.offset, agreement.chain) == (Action.SEED, base, chain)
        else:
            assert (agreement.action, agreement.offset) == (Action.FOLLOW, common)


def test_empty_master_restores_from_a_shortened_log():
    late = history((1, 1, 2, 3), drop=2)
    agreement = agree(hello_of(late), history(()).log, Epoch(9, 1), has_begun=False)
    assert (agreement.action, agreement.offset) == (Action.RESTORE, 0)


def test_slave_with_a_newer_epoch_fences_the_master():
    for known in (Epoch(9, 2), Epoch(10, 0)):
        with pytest.raises(Fenced):
            agree(hello_of(LOGS[1, 1], known), LOGS[1, 1].log, Epoch(9, 1), has_begun=True)
    agree(hello_of(LOGS[1, 1], Epoch(9, 1)), LOGS[1, 1].log, Epoch(9, 1), has_begun=True)


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("theirs_kept", ["nothing", "common", "all"])
def test_conflicting_slave_is_cut_unless_it_confirmed(has_begun, theirs_kept):
    """I5: if the slave confirmed its frames, the master yields, provided that no copy confirmed the master's."""
    for ours, theirs in list(product(HISTORIES, HISTORIES))[:: every(5)]:
        a, b = LOGS[ours], LOGS[theirs]
        common = common_prefix(a.whole(), b.whole())
        theirs_end = {"nothing": 0, "common": common, "all": b.log.end}[theirs_kept]
        answer = agree(replace(hello_of(b), kept_end=theirs_end), a.log, Epoch(9, 1), has_begun=has_begun)
        assert isinstance(answer, Yield) == (a.log.end > common and theirs_end > common), (ours, theirs, common)
        assert answer.offset == common, (ours, theirs, common)


@pytest.mark.parametrize("ours, theirs", [((1, 1), (1, 1)), ((1, 1, 1), (1, 1)), ((1, 1, 2), (1, 1))])
def test_equal_epochs_with_other_bytes_diverge(ours, theirs):
    """W3: no copy cuts anything; an operator decides."""
    with pytest.raises(Diverged):
        agree(hello_of(history(theirs, size=21)), history(ours).log, Epoch(9, 1), has_begun=True)


def test_agreement_survives_encoding():
    for action in Action:
        for more in ((), (Point(Epoch(4, 1), 800, 5), 96)):
            agreement = Agreement(Epoch(4, 2), action, 816, (1 << 64) - 1, 4096, *more)
            assert Agreement.decode(agreement.encode()) == agreement


@pytest.mark.parametrize("part, wrong", [(b'"seed"', b'"need"'), (b"96", b'"96"'), (b"[4, 1,", b"[4,")])
def test_malformed_agreement_is_refused(part, wrong):
    whole = Agreement(Epoch(4, 2), Action.SEED, 0, 0, 0, Point(Epoch(4, 1), 800, 5), 96).encode()
    assert whole.count(part) == 1
    with pytest.raises(InvalidRequest):
        Agreement.decode(whole.replace(part, wrong))


def test_empty_slave_with_a_chain_diverges():
    stranger = Hello("g1", "b", Epoch(1, 1), [], 0, 0, 7)
    with pytest.raises(Diverged):
        agree(stranger, LOGS[1, 1].log, Epoch(9, 1), has_begun=True)


def test_boot_that_the_slave_has_is_not_reused():
    """The master's disk forgot that boot. After its mastership has begun, these frames are its own."""
    hello, log = hello_of(LOGS[1, 3]), LOGS[1, 3].log
    with pytest.raises(Fenced):
        agree(hello, log, Epoch(3, 1), has_begun=False)
    assert agree(hello, log, Epoch(3, 2), has_begun=False).offset == log.end
    assert agree(hello, log, Epoch(3, 1), has_begun=True).offset == log.end


def test_agreement_at_an_epoch_begin_reads_nothing():
    ours, theirs = history((1, 1, 2), tail_bytes=0, segment_bytes=4096), LOGS[1, 1, 1]
    begin = ours.log.state.epochs[1].offset
    for at in (begin - 80, begin + 20):
        ours.flip(at)
    assert agree(hello_of(theirs), ours.log, Epoch(9, 1), has_begun=True).offset == begin


# Proofs of epochs.


def used_again(*, common: int = 1) -> tuple[Copy, Copy]:
    """Return two logs with `common` equal frames, then the same epoch at the same offset with different frames."""
    copies = Copy(tail_bytes=0), Copy(tail_bytes=0)
    for copy, name in zip(copies, ("here", "away"), strict=True):
        for number in range(common):
            copy.messages(f"{number}")
        copy.epoch = Epoch(2, 1)
        copy.messages(name)
        copy.messages("more")
        copy.flush()
    return copies


def proven(copy: Copy) -> Hello:
    return replace(hello_of(copy), proofs=proofs_of(copy.log))


def test_proofs_are_first_frames_of_newest_epochs():
    copy = Copy(segment_bytes=512, tail_bytes=0)
    for term in range(1, EPOCHS_PROVEN + 1):
        copy.begin_epoch(Epoch(term, 1))
        copy.fill(3)
    table, frames = copy.log.state.epochs, {}
    for more in range(1, 4):
        frames = {frame.offset: frame for frame, _ in decode_frames(copy.whole(), 0, 0)}
        proofs = [EpochProof(at, frames[at].end, frames[at].chain) for _, at, _ in table[-EPOCHS_PROVEN:]]
        assert proofs_of(copy.log) == proofs
        copy.begin_epoch(Epoch(EPOCHS_PROVEN + more, 1))
        assert proofs_of(copy.log) == proofs[1:], "the newest is not on disk"
        copy.flush()
    proofs = proofs_of(copy.log)
    damaged = proofs[-2].offset
    copy.flip(damaged + 20)
    while copy.log.start <= proofs[0].offset:
        copy.drop_oldest_segment()
    there = [proof for proof in proofs if proof.offset >= copy.log.start]
    assert 2 < len(there) < len(proofs) and proofs_of(copy.log) == [*there[:-2], there[-1]]


@pytest.mark.parametrize("common", [0, 1, 2])
def test_epoch_used_twice_is_not_common(common):
    here, away = used_again(common=common)
    begin = here.log.state.epochs[-1].offset
    answer = agree(proven(away), here.log, Epoch(9, 1), has_begun=True)
    assert (answer.action, answer.offset) == (Action.FOLLOW, begin)
    assert agree(proven(here), here.log, Epoch(9, 1), has_begun=True).offset == here.log.end


def test_unreadable_frames_prove_no_second_use():
    (here, _), (written, _) = used_again(), used_again()
    hello, begin = proven(here), here.log.state.epochs[-1].offset
    here.flip(begin + 20)
    assert agree(hello, here.log, Epoch(9, 1), has_begun=True).offset == here.log.end
    fresh = Copy()
    fresh.messages("0")
    fresh.flush()
    fresh.epoch = Epoch(2, 1)
    fresh.messages("here")
    fresh.messages("more")  # not flushed
    assert fresh.log.flushed_end == begin and fresh.log.chain == written.log.chain
    assert agree(proven(written), fresh.log, Epoch(9, 1), has_begun=True).offset == written.log.end
