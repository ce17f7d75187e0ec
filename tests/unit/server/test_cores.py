"""Shell. Which threads get a core first, as the kernel says of them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from qmq.server.cores import READ_NICE, SLICE_NS, come_first, stand_back
from tests.support.cores import needs_slices, nice_of, slice_ns


@pytest.fixture
def on_thread():
    """Runs calls on one thread that is thrown away: its priority would not come back."""
    with ThreadPoolExecutor(1) as threads:
        yield lambda call: threads.submit(call).result()


def of_a_new_thread(call):
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result()


@needs_slices
def test_a_thread_that_comes_first_has_short_slices_and_those_it_starts_have_not(on_thread):
    before = on_thread(slice_ns)
    on_thread(come_first)
    assert on_thread(slice_ns) == SLICE_NS < before
    assert on_thread(lambda: of_a_new_thread(slice_ns)) == before


def test_a_thread_that_comes_first_stays_as_nice_as_it_is(on_thread):
    before = nice_of()
    on_thread(lambda: os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), before + 1))
    on_thread(come_first)
    assert on_thread(nice_of) == before + 1


def test_who_is_favoured_has_threads_that_are(on_thread):
    def be_favoured() -> bool:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -3)
        except PermissionError:
            return False
        return True

    if not on_thread(be_favoured):
        pytest.skip("only root may favour a thread")
    on_thread(come_first)
    assert on_thread(nice_of) == -3
    assert on_thread(lambda: of_a_new_thread(nice_of)) == -3


def test_another_scheduler_that_somebody_chose_stays(on_thread):
    on_thread(lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)))
    on_thread(come_first)
    assert on_thread(lambda: os.sched_getscheduler(0)) == os.SCHED_BATCH


@needs_slices
def test_where_the_number_of_the_call_is_unknown_a_thread_goes_on_as_before(on_thread, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "another")
    before = on_thread(slice_ns)
    on_thread(come_first)
    assert on_thread(slice_ns) == before


def test_a_thread_that_stands_back_is_nice_alone(on_thread):
    before = nice_of()
    on_thread(stand_back)
    assert on_thread(nice_of) == max(READ_NICE, before)
    assert nice_of() == before


def test_a_thread_of_a_nicer_process_stays_as_nice():
    code = "import os; from qmq.server.cores import stand_back; os.nice(19); stand_back(); print(os.nice(0))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.stdout.strip() == "19", shown.stderr


@pytest.mark.parametrize(
    ("call", "name"),
    [(come_first, "sched_getscheduler"), (come_first, "getpriority"), (stand_back, "setpriority")],
)
def test_a_system_without_such_calls_or_that_refuses_them_stops_nobody(on_thread, monkeypatch, call, name):
    """musl's sched_getscheduler is always ENOSYS; systemd's SystemCallFilter=~@resources refuses setpriority."""

    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, name, refused)
    on_thread(call)
