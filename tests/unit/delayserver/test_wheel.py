"""Core. The wheel returns due messages in order, each once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.delayserver.schedule import RECORD
from qmq.delayserver.wheel import RUN_MAX, Wheel


def records(*entries: tuple[int, int]):
    """(number, due)"""
    made = np.zeros(len(entries), RECORD)
    made["number"], made["due"] = zip(*entries, strict=True) if entries else ((), ())
    made["size"], made["label"], made["subject"], made["crc"] = 100, made["number"] + 1, 3, 4
    return made


def pairs(taken) -> list[tuple[int, int]]:
    return list(zip(taken["number"].tolist(), taken["due"].tolist(), strict=True))


def test_only_due_messages_are_taken_earliest_first():
    wheel = Wheel()
    wheel.add(records((1, 50), (2, 10), (3, 30)))
    wheel.add(records((4, 20)))
    assert wheel.next_due_ms == 10
    assert pairs(wheel.take(9, 10)) == []
    assert pairs(wheel.take(30, 1)) == [(2, 10)]
    assert pairs(wheel.take(30, 2)) == [(4, 20), (3, 30)]
    assert len(wheel) == 1
    assert pairs(wheel.take(10**6, 9)) == [(1, 50)]
    assert (len(wheel), wheel.next_due_ms, wheel.bytes) == (0, None, 0)


def test_taken_message_has_all_fields():
    wheel = Wheel()
    wheel.add(records((7, 1)))
    (taken,) = wheel.take(1, 1)
    assert [int(taken[name]) for name in ("number", "due", "label", "size", "subject", "crc")] == [7, 1, 8, 100, 3, 4]


def test_taken_messages_can_be_added_again():
    wheel = Wheel()
    wheel.add(records((7, 1), (8, 2)))
    wheel.add(wheel.take(5, 1))
    assert pairs(wheel.take(5, 9)) == [(7, 1), (8, 2)]


def test_removed_message_is_not_taken():
    wheel = Wheel()
    wheel.add(records(*((i, 5) for i in range(100))))
    wheel.remove(records((3, 5), (3, 5), (4, 6), (555, 5)))
    wheel.remove(records(*((i, 5) for i in range(10, 100))))
    assert len(wheel) == 9
    assert [number for number, _ in pairs(wheel.take(5, 5))] == [0, 1, 2, 4]
    wheel.remove(records(*((i, 5) for i in range(5, 10))))
    assert pairs(wheel.take(5, 5)) == []
    assert len(wheel) == 0


def test_loaded_message_uses_at_most_40_bytes():
    wheel = Wheel()
    rng = np.random.default_rng(1)
    for _ in range(20):
        made = np.zeros(50_000, RECORD)
        made["due"], made["size"] = rng.integers(0, 3_600_000, 50_000), 1
        wheel.add(made)
    for _ in range(100):
        wheel.add(made[:37])
    assert wheel.bytes <= 40 * len(wheel)
    assert len(wheel) == 1_003_700


@pytest.mark.parametrize("count", [RUN_MAX, RUN_MAX + 1, 3 * RUN_MAX])
def test_many_due_messages_are_taken_in_parts(count):
    wheel = Wheel()
    made = np.zeros(count, RECORD)
    made["number"], made["due"], made["size"] = np.arange(count), 1000, 1
    wheel.add(made)
    numbers: list[int] = []
    while len(taken := wheel.take(1000, 10_000)):
        assert len(taken) <= 10_000
        numbers += taken["number"].tolist()
    assert sorted(numbers) == list(range(count))


ENTRY = st.tuples(st.integers(0, 40), st.integers(0, 20))
OPERATION = st.one_of(
    st.tuples(st.just("add"), st.lists(st.integers(0, 20), max_size=8)),
    st.tuples(st.just("remove"), st.lists(st.integers(0, 60), max_size=5)),
    st.tuples(st.just("take"), st.tuples(st.integers(0, 22), st.integers(1, 6))),
)


@given(st.lists(OPERATION, max_size=30))
def test_wheel_agrees_with_a_dict(operations):
    wheel, model, dues = Wheel(), dict[int, int](), dict[int, int]()
    for operation, argument in operations:
        if operation == "add":
            entries = [(len(dues) + i, due) for i, due in enumerate(argument)]
            dues.update(entries)
            model.update(entries)
            wheel.add(records(*entries))
        elif operation == "remove":
            wheel.remove(records(*((number, dues.get(number, 0)) for number in argument)))
            for number in argument:
                model.pop(number, None)
        else:
            now, most = argument
            taken = pairs(wheel.take(now, most))
            due = sorted(due for due in model.values() if due <= now)
            assert len(taken) == len(set(taken)) and len(taken) <= most
            assert (len(taken) == 0) == (not due)
            for number, at in taken:
                assert model.pop(number) == at
            assert [at for _, at in taken] == due[: len(taken)]
        assert len(wheel) == len(model)
