"""Core. Supervision of a worker's processes: restarts, reload, end, exit status."""

from __future__ import annotations

import signal

import pytest

from qmq.worker.plan import FAILURES_MAX, RESTART_S_MAX, STEADY_S, Exit, Plan


class Processes:
    """Processes by number; records the signals."""

    def __init__(self):
        self.started = 0
        self.terminated, self.killed = [], []
        self.terminate = self.terminated.append

    def start(self):
        self.started += 1
        return self.started

    def kill(self, process, why):
        self.killed.append(process)


@pytest.fixture
def processes():
    return Processes()


def running(processes, count=2, **options):
    """Return a plan with all processes ready at time 0."""
    plan = Plan(count, processes, stop_s=30.0, **options)
    plan.look(0.0)
    for process in range(1, count + 1):
        plan.ready(process, 0.0)
    return plan


def test_killed_process_is_restarted_with_back_off(processes):
    plan, waits = running(processes), []
    for number in range(9):
        lost, at = plan.places[0].current, number * 100.0
        plan.places[0].began_s = at
        plan.exited(lost, -signal.SIGKILL, at)
        waits.append(plan.places[0].due_s - at)
        plan.look(at)
        assert plan.places[0].current is None
        plan.look(plan.places[0].due_s)
    assert waits[:3] == [0.5, 1.0, 2.0] and waits[-1] == RESTART_S_MAX and plan.restarts == 9
    plan.exited(plan.places[0].current, 1, plan.places[0].began_s + STEADY_S)
    assert plan.places[0].failures == 1 and plan.exit is None


def test_stop_ends_when_all_processes_have(processes):
    plan = running(processes)
    plan.stop(10.0)
    assert processes.terminated == [1, 2] and not plan.has_ended
    plan.exited(1, 0, 11.0)
    plan.look(11.0)
    assert processes.started == 2, "nothing is restarted now"
    plan.exited(2, 0, 12.0)
    assert plan.has_ended and plan.exit is Exit.ENDED


def test_process_that_does_not_end_is_killed(processes):
    plan = running(processes)
    plan.stop(10.0)
    plan.look(39.0)
    assert not processes.killed
    plan.look(40.0)
    assert processes.killed == [1, 2] and plan.exit is Exit.FAILED
    again = running(Processes())
    again.stop(0.0)
    again.stop(1.0)
    assert again.exit is Exit.FAILED, "a second signal kills at once"


def looking(plan, begin_s, end_s, *reporting):
    """Look twice a second, while these processes report each time."""
    for half in range(int(begin_s * 2), int(end_s * 2) + 1):
        for process in reporting:
            plan.reported(process, half / 2)
        plan.look(half / 2)


def test_process_without_reports_is_killed_and_replaced(processes):
    plan = running(processes, kill_after_s=20.0)
    looking(plan, 0.0, 19.5, 2)
    assert not processes.killed
    looking(plan, 20.0, 25.0, 2)
    assert processes.killed == [1], "once"
    plan.exited(1, -signal.SIGKILL, 25.0)
    looking(plan, 25.0, 26.0, 2)
    assert plan.running == {2, 3} and plan.restarts == 1 and plan.exit is None


def test_hung_process_does_not_delay_the_end(processes):
    plan = running(processes, kill_after_s=5.0)
    looking(plan, 0.0, 4.0, 2)
    plan.stop(4.0)
    looking(plan, 4.5, 5.0, 2)
    assert processes.killed == [1] and plan.exit is Exit.FAILED


def test_worker_that_stood_still_kills_nothing(processes):
    plan = running(processes, kill_after_s=20.0)
    plan.look(1.0)
    plan.look(1000.0)
    assert not processes.killed
    looking(plan, 1000.5, 1020.0)
    assert processes.killed == [1, 2]


def test_replaced_process_that_does_not_end_is_killed(processes):
    plan = running(processes, count=1)
    plan.reload(10.0)
    plan.ready(2, 11.0)
    plan.look(40.5)
    assert not processes.killed
    plan.look(41.0)
    assert processes.killed == [1] and plan.exit is None and plan.restarts == 0


@pytest.mark.parametrize("status", [Exit.CANNOT_START, Exit.REFUSED])
def test_start_that_cannot_succeed_ends_the_worker(processes, status):
    plan = Plan(2, processes, stop_s=30.0)
    plan.look(0.0)
    plan.exited(1, status, 1.0)
    assert plan.exit is status and processes.terminated == [2]


def test_first_starts_that_fail_end_the_worker(processes):
    plan, now_s = Plan(1, processes, stop_s=30.0), 0.0
    for _ in range(FAILURES_MAX):
        plan.look(now_s := now_s + 40.0)
        plan.exited(processes.started, 1, now_s)
    assert plan.exit is Exit.FAILED and plan.has_ended


def test_import_error_of_later_restarts_is_retried(processes):
    plan = running(processes)
    plan.exited(1, Exit.CANNOT_START, 1.0)
    plan.look(10.0)
    assert plan.exit is None and processes.started == 3


def test_reload_ends_each_process_after_the_next_is_ready(processes):
    plan = running(processes)
    plan.reload(10.0)
    assert (processes.started, processes.terminated) == (3, [])
    plan.ready(3, 11.0)
    assert (processes.started, processes.terminated) == (4, [1])
    plan.ready(4, 12.0)
    assert processes.terminated == [1, 2]
    plan.exited(1, 0, 13.0)
    plan.exited(2, 0, 13.0)
    plan.look(14.0)
    assert plan.running == {3, 4} and processes.started == 4 and plan.restarts == 0


def test_failed_reload_keeps_the_old_processes(processes):
    plan = running(processes)
    plan.reload(10.0)
    plan.exited(3, Exit.CANNOT_START, 11.0)
    plan.look(20.0)
    assert plan.running == {1, 2} and plan.exit is None and not processes.terminated
    plan.reload(30.0)
    assert processes.started == 4


def test_reload_of_fixed_consumer_ids_ends_the_old_first(processes):
    plan = running(processes, count=1)
    plan.is_unique = True
    plan.reload(10.0)
    assert (processes.started, processes.terminated) == (1, [1])
    plan.look(40.0)
    assert processes.killed == [1], "it does not end"
    plan.exited(1, -signal.SIGKILL, 41.0)
    plan.look(41.0)
    plan.ready(2, 42.0)
    assert plan.running == {2} and plan.restarts == 0 and not plan.places[0].is_renewed


def test_import_error_waits_for_a_change_of_files(processes):
    plan = Plan(1, processes, stop_s=30.0, waits_for_change=True)
    plan.look(0.0)
    plan.exited(1, Exit.CANNOT_START, 1.0)
    plan.look(1000.0)
    assert processes.started == 1 and plan.exit is None
    plan.reload(1001.0)
    plan.look(1001.0)
    assert processes.started == 2
