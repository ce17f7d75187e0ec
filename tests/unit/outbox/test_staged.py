"""Core. What a transaction holds agrees with a slow list of lists, whatever its savepoints do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qmq.outbox.staged import Staged

STEPS = st.lists(st.sampled_from(["add", "savepoint", "release", "roll back"]), max_size=40)


@given(STEPS)
def test_what_is_left_is_what_no_savepoint_took_along(steps):
    staged, added, dropped = Staged[int](), [], []
    open_savepoints = []  # for each, how much was added before it
    for step, what in enumerate(steps):
        match what:
            case "add":
                staged.add([step])
                added.append(step)
            case "savepoint":
                staged.savepoint()
                open_savepoints.append(len(added))
            case "release" if open_savepoints:
                staged.release()
                open_savepoints.pop()
            case "roll back":  # without a savepoint of its own: one from before takes all along
                begin = open_savepoints.pop() if open_savepoints else 0
                assert staged.roll_back() == added[begin:]
                dropped += added[begin:]
                del added[begin:]
    assert staged.take() == added
    assert staged.take() == []
    assert not set(dropped) & set(added)
