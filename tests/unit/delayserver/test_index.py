"""Core. An index finds the same as reading all rows, and is bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.delayserver.schedule import RECORD, Schedule, State, id_hash, key_hash
from qmq.delayserver.schedule import search as index_module
from qmq.delayserver.schedule.search import Indexes
from qmq.delayserver.schedule.segment import Rows
from qmq.log.memory_disk import MemoryDisk
from tests.unit.delayserver.delay_log import HOUR_MS, DelayLog, delayed, flush_all


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(index_module, "INDEXED_LEAST", 1)


def rows(name, ids, keys=None):
    made = np.zeros(len(ids), RECORD)
    made["id_hash"], made["key_hash"], made["row"] = ids, keys if keys is not None else 0, np.arange(len(ids))
    return Rows(MemoryDisk(), name, 0, 0, (made,))


HASH = st.sampled_from([0, 1, 2, 7, (1 << 31), (1 << 32) - 1])


@given(st.lists(st.lists(st.tuples(HASH, HASH), min_size=1, max_size=20), max_size=12), st.lists(HASH, max_size=4))
def test_index_agrees_with_a_full_search(batches, wanted):
    indexes, ids, keys = Indexes(), [], []
    for batch in batches:
        ids += [id for id, _ in batch]
        keys += [key for _, key in batch]
        found = indexes.find(rows("s", ids, keys), wanted, wanted, replaces=True)
        expected = [(False, at, row) for at, hash in enumerate(wanted) for row, id in enumerate(ids) if id == hash]
        expected += [
            (True, at, row) for at, hash in enumerate(wanted) for row, key in enumerate(keys) if key == hash != 0
        ]
        assert sorted(found) == sorted(expected)


def test_newer_index_names_nothing_beyond_the_question():
    indexes = Indexes()
    assert indexes.find(rows("s", [5] * 10), [5], [], replaces=True)
    assert len(indexes.find(rows("s", [5] * 4), [5], [], replaces=True)) == 4


def test_indexes_are_bounded_and_keep_the_latest():
    indexes = Indexes(bytes_max=2 * 16 * 100)
    for name in "abc":
        assert indexes.find(rows(name, range(100)), [1], [], replaces=True) == [(False, 0, 1)]
        assert indexes.bytes <= 2 * 16 * 100
    assert indexes.find(rows("d", range(1000)), [1], [], replaces=True) is None, "larger than all of it"
    indexes.find(rows("b", range(100)), [1], [], replaces=True)
    indexes.find(rows("e", range(100)), [1], [], replaces=True)
    before = indexes.bytes
    indexes.drop(["b"])
    indexes.find(rows("e", range(100)), [1], [], replaces=True)
    assert indexes.bytes == before - 800


def test_full_search_replaces_no_index():
    indexes = Indexes(bytes_max=16 * 100)
    assert indexes.find(rows("a", range(100)), [1], [], replaces=True)
    assert indexes.find(rows("b", range(150)), [1], [], replaces=False) is None
    assert indexes.find(rows("a", range(100)), [1], [], replaces=False) == [(False, 0, 1)]


def test_later_rows_are_found_in_memory_and_on_disk():
    log, schedule = DelayLog(), Schedule(MemoryDisk(), segment_ms=HOUR_MS, log_start=DelayLog().start)

    def ask(*ids, keys=()):
        question = schedule.find("s", [id_hash(id) for id in ids], [key_hash(key) for key in keys], [1000])
        return [(found.by_key, found.position, found.state, int(found.record["number"])) for found in question()]

    where = log.messages([delayed("s", f"m{i}", 1000, key=f"k{i % 50}") for i in range(150)])
    log.file_into(schedule)
    assert ask("m7") == [(False, 0, State.PENDING, where[7][0])]
    assert len(ask(keys=["k7"])) == 3
    later = log.messages([delayed("s", "late", 1000)])
    log.file_into(schedule)
    assert ask("m7", "late") == [(False, 0, State.PENDING, where[7][0]), (False, 1, State.PENDING, later[0][0])]
    log.cancel(where[7:8])
    log.file_into(schedule)
    assert ask("m7") == [(False, 0, State.CANCELLED, where[7][0])]
    flush_all(schedule)
    assert ask("m7", "late")[1] == (False, 1, State.PENDING, later[0][0])
    log.cancel(where[8:9])
    log.file_into(schedule)
    assert ask("m8") == [(False, 0, State.CANCELLED, where[8][0])]
    more = log.messages([delayed("s", "later", 1000)])
    log.file_into(schedule)
    assert ask("later") == [(False, 0, State.PENDING, more[0][0])] and len(ask(keys=["k7"])) == 3


def test_question_sees_later_states():
    log, schedule = DelayLog(), Schedule(MemoryDisk(), segment_ms=HOUR_MS, log_start=DelayLog().start)
    for count in (1, 1, 100):
        places = log.messages([delayed("s", f"m{count}", 1000) for _ in range(count)])
        log.file_into(schedule)
        assert {found.state for found in schedule.find("s", [id_hash(f"m{count}")], [], [1000])()} >= {State.PENDING}
        log.cancel(places)
        log.file_into(schedule)
        states = [found.state for found in schedule.find("s", [id_hash(f"m{count}")], [], [1000])()]
        assert set(states) == {State.CANCELLED}
