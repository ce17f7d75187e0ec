"""Core. Where two copies agree, and what a slave has to do."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, product

import pytest

from qmq.errors import Diverged, Fenced, InvalidRequest
from qmq.log.frame import decode_frames
from qmq.remoting.commands import encode_json
from qmq.replication.agreement import Action, Agreement, Hello, Yield, agree
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
def test_hello_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(InvalidRequest):
        Hello.decode(encode_json(**(PLAIN | {"chain": 5} | wrong)))


def test_hello_arrives_as_it_was_sent():
    hello = Hello.decode(encode_json(**PLAIN, chain=(1 << 64) - 1))
    assert (hello.known, hello.chain) == (Epoch(1, 1), (1 << 64) - 1)
    assert Hello.decode(hello.encode()) == hello


def history(epochs: tuple[int, ...], *, size: int = 20, drop: int = 0) -> Copy:
    """A log with one frame per entry, of that term; its bytes follow from term, place and what is before."""
    copy = Copy(segment_bytes=200)
    for place, term in enumerate(epochs):
        copy.epoch = Epoch(term, 1)
        copy.messages(f"{place} in {term}", size=size)
    copy.flush()
    for _ in range(drop):
        copy.log.drop_oldest_segment()
    return copy


def hello_of(copy: Copy, known: Epoch | None = None) -> Hello:
    state = copy.log.state
    return Hello("g1", "b", known or Epoch(3, 1), state.epochs, copy.log.start, state.end, state.chain)


def common_prefix(ours: bytes, theirs: bytes) -> int:
    """Length of the longest common prefix of two logs, in whole frames."""
    frames = [frame for frame, _ in decode_frames(ours, 0, 0)]
    return max((f.end for f in frames if ours[: f.end] == theirs[: f.end] and f.end <= len(theirs)), default=0)


HISTORIES = [epochs for n in range(5) for epochs in combinations_with_replacement((1, 2, 3), n)]
LOGS = {epochs: history(epochs) for epochs in HISTORIES}


@pytest.mark.parametrize("has_begun", [False, True])
def test_copies_agree_on_their_longest_common_prefix_whatever_their_histories(has_begun):
    for ours, theirs in product(HISTORIES, HISTORIES):
        a, b = LOGS[ours], LOGS[theirs]
        common = common_prefix(a.whole(), b.whole())
        agreement = agree(hello_of(b), a.log, Epoch(9, 1), has_begun=has_begun, kept_end=0)
        assert agreement.offset == common, (ours, theirs)
        assert a.log.chain_is(common, agreement.chain) and b.log.chain_is(common, agreement.chain)
        gives = b.log.end > common == a.log.end and not has_begun
        assert agreement.action == (Action.RESTORE if gives else Action.FOLLOW)
        assert (agreement.epoch, agreement.master_end) == (Epoch(9, 1), a.log.end)


def test_slave_behind_the_oldest_segment_is_seeded_and_one_within_it_follows():
    whole, late = LOGS[1, 1, 2, 3], history((1, 1, 2, 3), drop=2)
    base, chain, _ = late.log.seed_start()
    assert 0 < late.log.start == base < late.log.end
    for epochs in HISTORIES:
        slave = LOGS[epochs]
        common = common_prefix(whole.whole(), slave.whole())
        agreement = agree(hello_of(slave), late.log, Epoch(9, 1), has_begun=True, kept_end=0)
        if common < late.log.start:
            assert (agreement.action, agreement.offset, agreement.chain) == (Action.SEED, base, chain)
        else:
            assert (agreement.action, agreement.offset) == (Action.FOLLOW, common)


def test_empty_master_takes_all_back_even_if_the_slave_has_no_beginning():
    late = history((1, 1, 2, 3), drop=2)
    agreement = agree(hello_of(late), history(()).log, Epoch(9, 1), has_begun=False, kept_end=0)
    assert (agreement.action, agreement.offset) == (Action.RESTORE, 0)


def test_slave_that_knows_a_newer_epoch_fences_the_master():
    for known in (Epoch(9, 2), Epoch(10, 0)):
        with pytest.raises(Fenced):
            agree(hello_of(LOGS[1, 1], known), LOGS[1, 1].log, Epoch(9, 1), has_begun=True, kept_end=0)
    agree(hello_of(LOGS[1, 1], Epoch(9, 1)), LOGS[1, 1].log, Epoch(9, 1), has_begun=True, kept_end=0)


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("theirs_kept, ours_kept", list(product(("nothing", "common", "all"), repeat=2)))
def test_where_logs_part_that_copy_gives_way_whose_tail_nobody_else_confirmed(has_begun, theirs_kept, ours_kept):
    """I5: the slave first; neither, if both confirmed what they have."""
    for ours, theirs in list(product(HISTORIES, HISTORIES))[:: every(5)]:
        a, b = LOGS[ours], LOGS[theirs]
        common = common_prefix(a.whole(), b.whole())
        kept = {"nothing": (0, 0), "common": (common, common), "all": (a.log.end, b.log.end)}
        ours_end, theirs_end = kept[ours_kept][0], kept[theirs_kept][1]
        hello, at = replace(hello_of(b), kept_end=theirs_end), (ours, theirs, common)
        parts = a.log.end > common and theirs_end > common
        if parts and ours_end > common:
            with pytest.raises(Diverged):
                agree(hello, a.log, Epoch(9, 1), has_begun=has_begun, kept_end=ours_end)
            continue
        answer = agree(hello, a.log, Epoch(9, 1), has_begun=has_begun, kept_end=ours_end)
        assert isinstance(answer, Yield) == parts, at
        assert answer.offset == common, at


@pytest.mark.parametrize("ours, theirs", [((1, 1), (1, 1)), ((1, 1, 1), (1, 1)), ((1, 1, 2), (1, 1))])
def test_equal_epochs_with_other_bytes_are_divergence_not_a_conflict(ours, theirs):
    """W3: nobody cuts anything; a human has to look."""
    with pytest.raises(Diverged):
        agree(hello_of(history(theirs, size=21)), history(ours).log, Epoch(9, 1), has_begun=True, kept_end=0)


def test_agreement_arrives_as_it_was_sent():
    for action in Action:
        agreement = Agreement(Epoch(4, 2), action, 816, (1 << 64) - 1, 4096)
        assert Agreement.decode(agreement.encode()) == agreement
    with pytest.raises(InvalidRequest):
        Agreement.decode(Agreement(Epoch(4, 2), Action.SEED, 0, 0, 0).encode().replace(b"seed", b"need"))
