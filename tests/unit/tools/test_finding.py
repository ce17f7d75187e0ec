"""Core. Doctor's judgement of measured values."""

from __future__ import annotations

import sys

import pytest

from qmq.tools.findings import (
    ClockReading,
    Level,
    fail,
    judge_broker,
    judge_causes,
    judge_clock,
    judge_group,
    judge_limits,
    judge_states,
    judge_versions,
    ok,
    parse_metrics,
    read_clock,
    read_version,
    warn,
    worst,
)
from qmq.tools.terminal import as_typed


@pytest.mark.parametrize(
    "ahead_ms, level, text",
    [
        (0, Level.OK, "less than"),
        (-2_400, Level.OK, "less than"),
        (-3_000, Level.WARN, "behind this machine"),
        (50_000, Level.WARN, "ahead of this machine"),
        (3_600_000, Level.FAIL, "about 3,600 s ahead of"),
    ],
)
def test_clock_findings_allow_for_the_error(ahead_ms, level, text):
    found = judge_clock("broker a", ClockReading(ahead_ms, uncertain_ms=500))
    assert found.level == level and text in found.found and (found.do == "") == (level is Level.OK)


def test_http_date_is_precise_to_a_second():
    """A `Date` is cut to seconds: both ends of that second must be within the uncertainty."""
    for real_ahead_ms in (-700, 0, 300, 999):
        date_ms = (1_000_000_040 + real_ahead_ms) // 1000 * 1000
        clock = read_clock(date_ms, sent_ms=1_000_000_000, received_ms=1_000_000_080)
        assert abs(clock.ahead_ms - real_ahead_ms) <= clock.uncertain_ms


def test_each_version_names_all_its_processes():
    (mixed,) = judge_versions({"a": "1", "b": "2", "c": "2"})
    assert mixed.found == "1: a; 2: b, c"


def group(**changes):
    master = {"role": "MASTER", "hostname": "a", "servePort": 1, "reachable": True, "term": 3}
    slave = {"role": "SLAVE", "hostname": "b", "servePort": 1, "reachable": True, "term": 3}
    return {"brokerGroup": "g1", "term": 3, "equal": True, "lagBytes": 0, "replicas": [master, slave]} | changes


@pytest.mark.parametrize(
    "changes, level, text",
    [
        ({}, Level.OK, "the slave of g1 is in sync"),
        ({"equal": None}, Level.OK, "the slave of g1 is in sync"),
        ({"equal": None, "lagBytes": 2 << 20}, Level.OK, "the slave of g1 is in sync"),  # normal under load
        ({"equal": False}, Level.FAIL, "the logs of g1 differ"),
        ({"term": 4}, Level.FAIL, "is in term 3, the metaserver in term 4"),
    ],
)
def test_terms_and_copies_are_compared(changes, level, text):
    findings = list(judge_group(group(**changes)))
    assert worst(findings) == level and any(text in finding.found for finding in findings)


@pytest.mark.parametrize("free, level", [(10 << 30, Level.OK), (3 << 29, Level.WARN), (1 << 20, Level.FAIL)])
def test_disks_are_judged_by_the_brokers_own_limit(free, level):
    metrics = {"qmq_broker_disk_free_bytes": free, "qmq_broker_disk_free_limit_bytes": 1 << 30}
    (found,) = judge_broker("a:1", "MASTER", metrics)
    assert (found.level, found.step) == (level, "disks")


def test_stopped_groups_are_findings_by_cause():
    labels = 'broker_group="g1",cause="{}",consumer_group="{}",subject="s"'
    given = [("offline", "a"), ("offline", "b"), ("prefetch", "c"), ("unacked", "d")]
    text = "".join(f"qmq_broker_group_cause{{{labels.format(*pair)}}} 1.0\n" for pair in given)
    offline, waits, unacked = judge_causes("a:1", text)
    assert offline.found == "a:1 delivers less to a of s, b of s: offline" and "OnOffline" in offline.do
    assert unacked.found == "a:1 delivers less to d of s: unacked"
    assert (waits.level, waits.found) == (Level.OK, "a:1 has messages that wait for c of s: prefetch")


def test_limits_reached_lately_are_findings():
    labels = 'broker_group="g1",setting="{}"'
    given = [("token_bytes_per_s", 1.0), ("connections_max", 1.0), ("window_bytes", 0.0)]
    text = "".join(f"qmq_broker_limited{{{labels.format(name)}}} {value}\n" for name, value in given)
    (found,) = judge_limits("a:1", text)
    assert found.level is Level.WARN and found.found.endswith(": connections_max, token_bytes_per_s")
    (found,) = judge_limits("d:1", text.replace("broker_limited", "delayserver_limited"))
    assert list(judge_limits("a:1", "")) == []


def test_full_subjects_are_findings_with_their_limit():
    labels = 'broker_group="g1",setting="{}"'
    limited = "".join(
        f"qmq_broker_limited{{{labels.format(setting)}}} 1.0\n" for setting in ("messagesMax", "window_bytes")
    )
    of = labels.format("messagesMax")
    full = "".join(f'qmq_broker_limited_subject{{{of},subject="{name}"}} 1.0\n' for name in "abcde")
    own, subjects = judge_limits("a:1", limited + full)
    assert own.found == "a:1 stopped or refused clients within the last minute: window_bytes"
    assert (subjects.level, subjects.step) == (Level.WARN, "limits")
    assert subjects.found == (
        "a:1 refused producers of a, b, c and 2 more within the last minute: the backlog of a consumer group "
        "reached its limit (messagesMax)"
    )
    assert "Lag" in subjects.do and "SetLimits --messagesMax" in subjects.do


def test_delay_server_without_routes_is_a_finding():
    metrics = {"qmq_delayserver_is_master": 1.0, "qmq_delayserver_refused_routes": 3.0}
    (found,) = judge_broker("a:1", "DELAY_MASTER", metrics)
    assert (found.level, found.step) == (Level.WARN, "routes") and "3 subjects" in found.found


def test_delay_server_has_its_own_findings():
    metrics = {"qmq_delayserver_is_master": 1.0, "qmq_delayserver_disk_free_bytes": 10.0 * 2**30}
    (found,) = judge_broker("d:1", "DELAY_MASTER", metrics)
    assert (found.level, found.step) == (Level.OK, "disks")
    (found, _) = judge_broker("d:1", "DELAY_SLAVE", metrics)
    assert found.level is Level.FAIL and "has it as DELAY_SLAVE" in found.found
    jumped = metrics | {"qmq_delayserver_clock_difference_seconds": -86_400.0}
    (found, _) = judge_broker("d:1", "DELAY_MASTER", jumped)
    assert (found.level, found.step) == (Level.WARN, "clocks") and "time service" in found.do
    (found, _) = judge_broker("d:1", "DELAY_MASTER", metrics | {"qmq_delayserver_clocks": 2.0})
    assert (found.level, found.step) == (Level.WARN, "clocks") and "2 of 3" in found.found
    late = metrics | {"qmq_delayserver_due_messages": 7.0, "qmq_delayserver_due_age_seconds": 61.0}
    (found, _) = judge_broker("d:1", "DELAY_MASTER", late)
    assert (found.level, found.step) == (Level.WARN, "delays") and "7 due messages" in found.found
    assert read_version('qmq_delayserver_info{broker_group="d1",version="1.2"} 1.0') == "1.2"


def test_metrics_are_read_by_name():
    text = '# HELP x y\nx{a="b c"} 1.5\ny_total 2e3\nbad nonsense\n\nx{a="d"} NaN'
    metrics = parse_metrics(text)
    assert metrics["y_total"] == 2000 and metrics["x"] != metrics["x"] and set(metrics) == {"x", "y_total"}


def test_a_brokers_version_is_read_from_its_metrics():
    assert read_version('# TYPE x\nqmq_broker_info{broker_group="g1",version="0.1.0"} 1.0\n') == "0.1.0"
    assert read_version("qmq_broker_writable 1.0") == ""


def test_the_worst_finding_counts():
    assert worst([ok("a", "b"), fail("a", "b", "c"), warn("a", "b", "c")]) is Level.FAIL
    assert worst([]) is Level.OK


def test_illegal_state_transition_fails_doctor():
    moves = [{"event": f"E{number}", "after": "LAGGING", "secondsAgo": number} for number in (7, 6, 5, 4, 3, 2.5)]
    machine = {"about": "its slave", "state": "LAGGING", "illegal": 0, "transitions": moves}
    fine = judge_states("b:1", machine)
    assert fine.level is Level.OK and fine.step == "states of b:1: its slave"
    assert fine.found.startswith("LAGGING, E6 -> LAGGING 6.0 s ago,") and fine.found.endswith("2.5 s ago")
    bad = judge_states("b:1", {**machine, "illegal": 2})
    assert bad.level is Level.FAIL and "2 illegal moves" in bad.found and bad.do


@pytest.mark.parametrize(("typed", "named"), [("/usr/bin/qmq", "qmq"), ("/opt/qmq/tools/__main__.py", "tools.sh")])
def test_commands_are_shown_as_typed_here(monkeypatch, typed, named):
    monkeypatch.setattr(sys, "argv", [typed])
    assert as_typed("start it; or qmq Failover --brokerGroup=g1") == f"start it; or {named} Failover --brokerGroup=g1"
    assert as_typed("a newer qmq has used it; qmq 0.2.0") == "a newer qmq has used it; qmq 0.2.0"
