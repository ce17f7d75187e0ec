"""Shell. Every alert rule, by `promtool test rules`: one fault fires its alert and no other.

Each case starts from the series of a healthy installation and changes those of its fault. It states the minutes until
the alert fires; shortly before that, nothing does. Two more installations share the Prometheus: `staging` is healthy,
so no fault pages there; `burning` has the faults that silence other alerts, so none is masked by it.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from qmq.cli import PROGRAMS
from qmq.tools.commands import COMMANDS
from tests.unit.deploy.clusters import crossings

ROOT = Path(__file__).parents[3]

RULES = ROOT / "deploy" / "prometheus" / "qmq.rules.yml"
RUNBOOK = ROOT / "docs" / "runbook.md"
REASONS = (
    "operator",
    "slave_down",
    "slave_lag",
    "disk",
    "disk_late",
    "memory",
    "corrupt",
    "diverged",
    "fenced",
    "draining",
)
LAG = 'qmq_broker_lag_messages{broker_group="g1",subject="a",consumer_group="c",instance="b1"}'
DEAD = 'qmq_broker_dead_letters_total{broker_group="g1",subject="a",consumer_group="c",instance="b1"}'
OLDEST = 'qmq_broker_oldest_delivered_seconds{broker_group="g1",subject="b",consumer_group="c"}'
SKIPPED = 'qmq_broker_skipped_messages_total{broker_group="g1",subject="a",consumer_group="c"}'
SCRUBBED = 'qmq_broker_scrub_findings_total{broker_group="g1",instance="b1"}'
DATABASE_UP = 'qmq_metaserver_database_up{instance="m1"}'
SET_ASIDE = 'qmq_metaserver_database_set_aside{instance="m1"}'
AUDITED = 'qmq_nightly_last_success_timestamp_seconds{name="audit"}'
BACKED_UP = 'qmq_nightly_last_success_timestamp_seconds{name="backup"}'
SWAPS_UNKNOWN = 'qmq_metaserver_management_actions_total{action="SwapRoles",result="unknown"}'
LATE = 'qmq_delayserver_lateness_seconds_bucket{broker_group="d",le="0.1"}'
AUDIT_EXIT = 'qmq_nightly_exit_status{name="audit"}'
SCRUB_EXIT = 'qmq_nightly_exit_status{name="scrub"}'
SLAVE_UP = 'qmq_metaserver_broker_up{broker_group="g1",role="slave",instance="m1"}'
MASTER_UP = 'qmq_metaserver_broker_up{broker_group="g1",role="master",instance="m1"}'
MASTER_SCRAPED = 'up{kind="broker",instance="b1"}'
FINDINGS = 'qmq_audit_verdict{broker_group="g1",verdict="findings"}'
VERIFIED = 'qmq_audit_verified_timestamp_seconds{broker_group="g1"}'
QUARANTINE = 'qmq_broker_quarantine_bytes{broker_group="g1",instance="b1"}'
AWAY = 'broker_group="g1",subject="a",consumer_group="h1-ab",instance="b1"'
"""Labels of a broadcast consumer that is gone, as after each process and each Consume command."""
DAY_M = 24 * 60

WELL = {
    'up{kind="metaserver",instance="m1"}': "1",
    'up{kind="metaserver",instance="m2"}': "1",
    MASTER_SCRAPED: "1",
    'up{kind="broker",instance="b2"}': "1",
    'up{kind="watchdog",instance="w1"}': "1",
    'up{kind="gateway",instance="gw1"}': "1",
    'up{instance="somebody else"}': "0",
    'process_start_time_seconds{kind="broker",instance="b1"}': "1000",
    'process_open_fds{kind="broker",instance="b1"}': "700",
    'process_max_fds{kind="broker",instance="b1"}': "1024",
    'qmq_broker_info{version="1",instance="b1"}': "1",
    'qmq_delayserver_info{version="1",instance="d1"}': "1",
    'qmq_broker_is_master{broker_group="g1",instance="b1"}': "1",
    'qmq_broker_is_master{broker_group="g1",instance="b2"}': "0",
    'qmq_delayserver_is_master{broker_group="d",instance="d1"}': "1",
    MASTER_UP: "1",
    SLAVE_UP: "1",
    'qmq_metaserver_broker_up{broker_group="d",role="master",instance="m1"}': "1",
    'qmq_metaserver_group_row_old{broker_group="g1"}': "0",
    f"qmq_broker_lag_messages{{{AWAY}}}": "50+1x3000",
    f'qmq_broker_group_cause{{{AWAY},cause="away"}}': "1",
    'qmq_broker_lag_messages{broker_group="g1",subject="dead",consumer_group="qmq.redrive",instance="b1"}': "3+0x3000",
    'qmq_broker_oldest_delivered_seconds{broker_group="g1",subject="b",consumer_group="h1-ab",instance="b1"}': "9999",
    'qmq_broker_group_cause{broker_group="g1",subject="b",consumer_group="h1-ab",instance="b1",cause="away"}': "1",
    **{f'qmq_broker_readonly{{broker_group="g1",reason="{reason}",instance="b1"}}': "0" for reason in REASONS},
    **{f'qmq_delayserver_readonly{{broker_group="d",reason="{reason}",instance="d1"}}': "0" for reason in REASONS},
    **{
        f'qmq_{kind}_produce_seconds_bucket{{broker_group="{group}",le="{bound}"}}': "0+600x3000"
        for kind, group in (("broker", "g1"), ("delayserver", "d"))
        for bound in ("0.1", "2", "+Inf")
    },
    'qmq_broker_limited{broker_group="g1",setting="token_bytes_per_s",instance="b1"}': "0",
    'qmq_broker_refused_messages_total{broker_group="g1"}': "7",
    'qmq_broker_disk_free_bytes{broker_group="g1",instance="b1"}': "900",
    'qmq_broker_disk_free_limit_bytes{broker_group="g1",instance="b1"}': "100",
    'qmq_delayserver_disk_free_bytes{broker_group="d",instance="d1"}': "900",
    'qmq_delayserver_disk_free_limit_bytes{broker_group="d",instance="d1"}': "100",
    QUARANTINE: "900",
    'qmq_broker_quarantine_limit_bytes{broker_group="g1",instance="b1"}': "1000",
    'qmq_delayserver_quarantine_bytes{broker_group="d",instance="d1"}': "900",
    'qmq_delayserver_quarantine_limit_bytes{broker_group="d",instance="d1"}': "1000",
    LAG: "500-1x400 100+0x1 0x3000",
    'qmq_broker_subject_messages_total{broker_group="g1",subject="a"}': "0+600x3000",
    SKIPPED: "5",
    'qmq_broker_oldest_delivered_seconds{broker_group="g1",subject="a",consumer_group="c"}': "90x390 10x3000",
    OLDEST: "90",
    'qmq_delayserver_due_age_seconds{broker_group="d"}': "0 9 0 59 0",
    LATE: "0+600x3000",
    'qmq_delayserver_lateness_seconds_bucket{broker_group="d",le="10"}': "0+600x3000",
    'qmq_delayserver_lateness_seconds_bucket{broker_group="d",le="+Inf"}': "0+600x3000",
    'qmq_delayserver_rejected_messages_total{broker_group="d"}': "2",
    'qmq_delayserver_clock_difference_seconds{broker_group="d",instance="d1"}': "0.2",
    'qmq_watchdog_leader{instance="w1"}': "1",
    'qmq_watchdog_leader{instance="w2"}': "0",
    'qmq_watchdog_database_up{database="shop"}': "1",
    'qmq_watchdog_oldest_seconds{database="shop"}': "30",
    'qmq_watchdog_rows{database="shop",state="parked"}': "0",
    'qmq_watchdog_rows{database="shop",state="pending"}': "40",
    "qmq_metaserver_refused_tokens_total": "4",
    DATABASE_UP: "1",
    SET_ASIDE: "0",
    'qmq_metaserver_token_expiry_timestamp_seconds{name="shop",id="old"}': "900",
    'qmq_metaserver_token_expiry_timestamp_seconds{name="shop",id="new"}': "31536000",
    'qmq_metaserver_consumer_group_removal_timestamp_seconds{subject="s",consumer_group="old"}': "31536000",
    'qmq_metaserver_management_actions_total{action="SwapRoles",result="done"}': "0+1x3000",
    SWAPS_UNKNOWN: "1",
    'qmq_metaserver_doctor_findings{check="group",instance="m1"}': "0",
    'qmq_metaserver_doctor_findings{check="broker",instance="m1"}': "0",
    'qmq_metaserver_doctor_findings{check="tokens",instance="m1"}': "2",
    AUDIT_EXIT: "0",
    'qmq_nightly_exit_status{name="backup"}': "0",
    SCRUB_EXIT: "0",
    'qmq_audit_unverified_bytes{broker_group="g1"}': "0",
    FINDINGS: "0",
    'qmq_audit_verdict{broker_group="gone",verdict="findings"}': "1",
    'qmq_audit_run_timestamp_seconds{broker_group="g1"}': "0+60x3000",
    'qmq_audit_run_timestamp_seconds{broker_group="gone"}': "-99999",
    VERIFIED: "0+60x3000",
    'qmq_audit_verified_timestamp_seconds{broker_group="gone"}': "-199999",
    'qmq_metaserver_audit_ledger_up{instance="m1"}': "1",
    AUDITED: "0+60x3000",
    BACKED_UP: "0+60x3000",
    'qmq_metaserver_loss_accepted{broker_group="g9"}': "0",
    'qmq_broker_held_bytes{broker_group="g1",subject="s",consumer_group="d",instance="b1"}': "9x1400 stale",
    'kube_job_status_failed{job_name="qmq-backup-28"}': "0",
    'kube_cronjob_status_last_successful_time{cronjob="qmq-backup"}': "0+60x3000",
}
"""Series -> values, a minute apart; a single value stays."""

BURNING = WELL | {
    MASTER_SCRAPED: "0",
    MASTER_UP: "0",
    'qmq_metaserver_broker_up{broker_group="d",role="master",instance="m1"}': "0",
    'qmq_broker_readonly{broker_group="g1",reason="disk",instance="b1"}': "1",
    'qmq_broker_group_cause{broker_group="g1",subject="a",consumer_group="c",instance="b1",cause="away"}': "1",
    'qmq_broker_group_cause{broker_group="g1",subject="b",consumer_group="c",instance="b1",cause="away"}': "1",
    SET_ASIDE: "1",
    FINDINGS: "1",
    SCRUBBED: "0+1x3000",
}
"""Series with faults that silence alerts of their own installation."""


def readonly(reason, kind="broker"):
    group, instance = ("g1", "b1") if kind == "broker" else ("d", "d1")
    return f'qmq_{kind}_readonly{{broker_group="{group}",reason="{reason}",instance="{instance}"}}'


@dataclass(frozen=True)
class Story:
    alert: str
    after_m: int
    """Minutes from the start until it fires."""
    changed: dict[str, str | None] = field(default_factory=dict)
    """Series -> other values; None removes it."""
    id: str = ""


STORIES = [
    Story("QmqNoMetaserver", 1, {f'up{{kind="metaserver",instance="m{n}"}}': "0" for n in (1, 2)}),
    Story("QmqMetaserverDown", 2, {'up{kind="metaserver",instance="m1"}': "0"}),
    Story(
        "QmqBrokerDown",
        1,
        {
            SLAVE_UP: "0",
            'up{kind="broker",instance="b2"}': "0",
            readonly("slave_down"): "1",
        },
        "slave",
    ),
    Story(
        "QmqBrokerDown",
        1,
        {
            MASTER_UP: "0",
            MASTER_SCRAPED: "0",
            'qmq_broker_is_master{broker_group="g1",instance="b1"}': None,
            **{readonly(reason): None for reason in REASONS},
        },
        "master",
    ),
    Story("QmqScrapeFailed", 10, {MASTER_SCRAPED: "0"}),
    Story("QmqScrapeFailed", 10, {'up{kind="watchdog",instance="w2"}': "0"}, "a standby"),
    Story("QmqScrapeFailed", 10, {'up{kind="gateway",instance="gw1"}': "0"}, "a gateway"),
    Story("QmqFewDescriptors", 5, {'process_open_fds{kind="broker",instance="b1"}': "930"}),
    Story("QmqProcessRestarts", 3, {'process_start_time_seconds{kind="broker",instance="b1"}': "1 2 3 4x500"}),
    Story("QmqVersionsDiffer", 6 * 60, {'qmq_broker_info{version="2",instance="b2"}': "1"}),
    Story("QmqGroupWithoutMaster", 2, {'qmq_broker_is_master{broker_group="g1",instance="b1"}': "0"}),
    Story("QmqTwoMasters", 1, {'qmq_broker_is_master{broker_group="g1",instance="b2"}': "1"}),
    Story("QmqGroupRowOld", 5, {'qmq_metaserver_group_row_old{broker_group="g1"}': "1"}),
    Story("QmqLossAccepted", 0, {'qmq_metaserver_loss_accepted{broker_group="g1"}': "1"}),
    Story("QmqSlaveMissing", 2, {readonly("slave_down"): "1"}),
    Story("QmqSlaveMissing", 2, {readonly("slave_down", "delayserver"): "1"}, "of delay servers"),
    Story("QmqSlaveLagging", 2, {readonly("slave_lag"): "1"}),
    Story("QmqCopiesDiffer", 0, {readonly("diverged"): "1"}),
    Story("QmqLogDamaged", 5, {readonly("corrupt"): "1"}),
    Story("QmqGroupMarked", 120, {readonly("operator"): "1"}),
    Story(
        "QmqProduceSlow",
        11,
        {
            f'qmq_broker_produce_seconds_bucket{{broker_group="g1",le="{bound}"}}': f"0+{step}x3000"
            for bound, step in (("0.1", 500), ("2", 600), ("+Inf", 600))
        },
    ),
    Story("QmqLimitReached", 15, {'qmq_broker_limited{broker_group="g1",setting="window_bytes",instance="b1"}': "1"}),
    Story("QmqMessagesRefused", 16, {'qmq_broker_refused_messages_total{broker_group="g1"}': "0+1x500"}),
    Story(
        "QmqDiskFull", 1, {readonly("disk"): "1", 'qmq_broker_disk_free_bytes{broker_group="g1",instance="b1"}': "90"}
    ),
    Story("QmqDiskFillsUp", 10, {'qmq_broker_disk_free_bytes{broker_group="g1",instance="b1"}': "190"}),
    Story(
        "QmqDiskFillsUp", 10, {'qmq_delayserver_disk_free_bytes{broker_group="d",instance="d1"}': "190"}, "delay server"
    ),
    Story("QmqQuarantineFull", 10, {QUARANTINE: "1001"}),
    Story(
        "QmqQuarantineFull",
        10,
        {'qmq_delayserver_quarantine_bytes{broker_group="d",instance="d1"}': "1001"},
        "delay server",
    ),
    Story("QmqDiskLate", 1, {readonly("disk_late"): "1"}),
    Story("QmqMemoryFull", 5, {readonly("memory"): "1"}),
    Story("QmqConsumerStalled", 6, {LAG: "50+0x500"}, "nobody consumes"),
    Story("QmqConsumerStalled", 6, {LAG: "50+10x500"}, "falls behind"),
    Story("QmqMessagesUnacked", 5, {OLDEST: "3601+60x500"}),
    Story(
        "QmqMessagesUnacked",
        5,
        {
            OLDEST: "3601+60x500",
            'qmq_broker_lag_messages{broker_group="g1",subject="b",consumer_group="c"}': "50 40 60 30x500",
        },
        "one handler of a busy group",
    ),
    Story(
        "QmqGroupPostpones",
        5,
        {
            'qmq_broker_group_cause{broker_group="g1",subject="a",consumer_group="c",cause="postponed"}': "1",
        },
    ),
    Story("QmqDeadLetters", 90, {DEAD: "_x90 1x500"}, "the first one that a master sees"),
    Story("QmqDeadLetters", 120, {DEAD: "3x119 4x500"}, "one more"),
    Story("QmqMessagesSkipped", 1, {SKIPPED: "5 6x500"}),
    Story("QmqDelayedMessagesWait", 1, {'qmq_delayserver_due_age_seconds{broker_group="d"}': "61+60x500"}),
    Story("QmqDelayedMessagesLate", 6, {LATE: "0+500x3000"}),
    Story("QmqDelayedMessagesRejected", 1, {'qmq_delayserver_rejected_messages_total{broker_group="d"}': "2 3x500"}),
    Story("QmqClocksDisagree", 5, {'qmq_broker_clocks_disagree{broker_group="g1",instance="b1"}': "1"}),
    Story(
        "QmqLogHeld",
        DAY_M,
        {'qmq_broker_held_bytes{broker_group="g1",subject="s",consumer_group="c",instance="b1"}': "9"},
    ),
    Story("QmqDamageFound", 1, {SCRUBBED: "0 1x3000"}),
    Story("QmqDamageFound", 1, {SCRUBBED: "0 1x3000", SCRUB_EXIT: "0 1x3000"}, "and the report says so as well"),
    Story("QmqDelayClockOff", 5, {'qmq_delayserver_clock_difference_seconds{broker_group="d",instance="d1"}': "-3"}),
    Story("QmqNoActiveWatchdog", 1, {'qmq_watchdog_leader{instance="w1"}': "0"}, "all wait"),
    Story(
        "QmqNoActiveWatchdog",
        15,
        {
            'up{kind="watchdog",instance="w1"}': "1x14 0x500",
            'qmq_watchdog_leader{instance="w1"}': "1x13 stale",
            'qmq_watchdog_leader{instance="w2"}': "0x13 stale",
        },
        "all are down",
    ),
    Story("QmqOutboxDatabaseDown", 2, {'qmq_watchdog_database_up{database="shop"}': "0"}),
    Story("QmqOutboxOld", 2, {'qmq_watchdog_oldest_seconds{database="shop"}': "601"}),
    Story("QmqOutboxParked", 5, {'qmq_watchdog_rows{database="shop",state="parked"}': "1"}),
    Story("QmqMetadataDatabaseDown", 1, {DATABASE_UP: "0"}),
    Story("QmqMetadataSetAside", 1, {DATABASE_UP: "0", SET_ASIDE: "1"}),
    Story("QmqTokenExpires", 60, {'qmq_metaserver_token_expiry_timestamp_seconds{name="shop",id="new"}': "600000"}),
    Story(
        "QmqConsumerGroupExpires",
        60,
        {'qmq_metaserver_consumer_group_removal_timestamp_seconds{subject="s",consumer_group="g"}': "600000"},
    ),
    Story("QmqTokensRefused", 11, {"qmq_metaserver_refused_tokens_total": "0+60x500"}),
    Story("QmqActionUnknown", 1, {SWAPS_UNKNOWN: "1 2x500"}),
    Story("QmqDoctorFinds", 30, {'qmq_metaserver_doctor_findings{check="group",instance="m1"}': "1"}),
    Story("QmqAuditFoundDifferences", 0, {AUDIT_EXIT: "1"}),
    Story("QmqAuditUnverified", 0, {'qmq_audit_unverified_bytes{broker_group="g1"}': "4096"}),
    Story("QmqGroupUnproven", 36 * 60 + 1, {VERIFIED: "0"}),
    Story("QmqAuditFoundDifferences", 0, {VERIFIED: "-199999", FINDINGS: "1"}, "night after night"),
    Story("QmqAuditLedgerAway", 60, {'qmq_metaserver_audit_ledger_up{instance="m1"}': "0"}),
    Story("QmqNightlyJobFailed", 0, {'qmq_nightly_exit_status{name="backup"}': "1"}, "backup"),
    Story("QmqNightlyJobFailed", 0, {AUDIT_EXIT: "2"}, "audit read nothing"),
    Story("QmqScrubFindings", 0, {SCRUB_EXIT: "1"}),
    Story("QmqNightlyJobFailed", 0, {SCRUB_EXIT: "3"}, "a copy is silent"),
    Story("QmqNightlyJobFailed", 0, {'kube_job_status_failed{job_name="qmq-backup-29"}': "1"}, "on Kubernetes"),
    Story(
        "QmqNightlyJobMissed",
        26 * 60 + 1,
        {
            BACKED_UP: "0",
            'kube_cronjob_status_last_successful_time{cronjob="qmq-backup"}': None,
        },
        "backup",
    ),
    Story(
        "QmqNightlyJobMissed",
        26 * 60 + 1,
        {
            'kube_cronjob_status_last_successful_time{cronjob="qmq-audit"}': "0",
            AUDITED: None,
        },
        "on Kubernetes",
    ),
    Story("QmqNeverAudited", 26 * 60, {AUDITED: None, AUDIT_EXIT: None}),
]


def promtool(folder, tests, *, every_m=1):
    """Run `promtool test rules` over test groups; return its complaints."""
    (folder / "tests.yml").write_text(
        json.dumps({"rule_files": [str(RULES)], "evaluation_interval": f"{every_m}m", "tests": tests})
    )
    ended = subprocess.run(["promtool", "test", "rules", folder / "tests.yml"], capture_output=True, text=True)
    return "" if ended.returncode == 0 else ended.stdout + ended.stderr


def test_group(series, expected):
    """Return one group of a test file; `series`: of `prod`; `expected`: minutes -> names of its alerts."""
    clusters = {"prod": series, "staging": WELL, "burning": BURNING}
    return {
        "interval": "1m",
        "input_series": [
            {"series": of_cluster(name, cluster), "values": values if set("x ") & set(values) else f"{values}x3000"}
            for cluster, all_series in clusters.items()
            for name, values in all_series.items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (cluster, alertname) (ALERTS{alertstate="firing", cluster!="burning"})',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": f'{{cluster="prod", alertname="{name}"}}', "value": 1} for name in names],
            }
            for minute, names in expected.items()
        ],
    }


def of_cluster(series, cluster):
    name, _, labels = series.rstrip("}").partition("{")
    own = f'cluster="{cluster}"'
    return f"{name}{{{labels},{own}}}" if labels else f"{name}{{{own}}}"


test_group.__test__ = False


def test_healthy_installation_has_no_alert(tmp_path):
    assert promtool(tmp_path, [test_group(WELL, {minute: [] for minute in (0, 5, 30, 400)})]) == ""
    assert promtool(tmp_path, [test_group(WELL, {2 * DAY_M: []})], every_m=10) == ""


@pytest.mark.parametrize("story", STORIES, ids=lambda story: " ".join(filter(None, (story.alert, story.id))))
def test_each_fault_fires_only_its_alert(tmp_path, story):
    series = {name: values for name, values in (WELL | story.changed).items() if values is not None}
    every_m = 1 if story.after_m < DAY_M else 10  # promtool takes twenty seconds for a day by the minute
    before = {(story.after_m - 1) // every_m * every_m: []} if story.after_m else {}
    after = {-(-story.after_m // every_m) * every_m: [story.alert]}
    assert promtool(tmp_path, [test_group(series, before | after)], every_m=every_m) == ""


def test_findings_alert_beside_an_unread_group(tmp_path):
    """The exit status is that of the worst group: 2."""
    found = {
        AUDIT_EXIT: "2",
        FINDINGS: "1",
    }
    expected = {0: ["QmqAuditFoundDifferences", "QmqNightlyJobFailed"]}
    assert promtool(tmp_path, [test_group(WELL | found, expected)]) == ""


def test_doctor_alert_yields_to_specific_alerts(tmp_path):
    """A broker is down for ten hours; the consequences last half an hour more."""
    down = "1 0x600 1x300"
    series = WELL | {
        SLAVE_UP: down,
        'qmq_metaserver_doctor_findings{check="broker",instance="m1"}': "0 1x900",
    }
    expected = {10: ["QmqBrokerDown"], 500: ["QmqBrokerDown"], 625: [], 640: ["QmqDoctorFinds"]}
    assert promtool(tmp_path, [test_group(series, expected)]) == ""


def rules():
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_every_rules_metrics_exist():
    """Reveals a rule that always fires: nothing fires here."""
    known = {re.match(r"\w+", series)[0] for series in WELL}
    known.add("qmq_broker_dead_letters_total")  # a new series of it fires; this case has an older one
    for rule in rules():
        read = re.findall(r"\b(?:qmq|kube|process)_\w+", rule["expr"])
        assert {name for name in read if not name.endswith("_")} <= known, rule["alert"]


def test_unscraped_master_is_no_missing_master(tmp_path):
    """A group's targets were written before its master had registered: a page reported a missing master."""
    unscraped = {'qmq_broker_is_master{broker_group="g1",instance="b1"}', MASTER_SCRAPED}
    series = {name: values for name, values in WELL.items() if name not in unscraped}
    assert promtool(tmp_path, [test_group(series, {minute: [] for minute in (1, 5, 30)})]) == ""


def test_rules_keep_clusters_apart():
    for rule in rules():
        assert crossings(rule["expr"]) == [], rule["alert"]
        assert rule["annotations"]["summary"].startswith("{{ $labels.cluster }}: "), rule["alert"]


@pytest.mark.parametrize(
    "expr",
    [
        "sum(up) == 0",
        "sum(up) by (cluster)",
        "max by (broker_group) (x)",
        "topk(20, x)",
        "a and on () b",
        "a unless on (name) b",
        "a / ignoring (cluster) b",
        "sum without (cluster) (x)",
        'absent(up{cluster="prod"})',
        "x or vector(0)",
    ],
)
def test_expression_that_joins_clusters_is_found(expr):
    assert crossings(expr) != []


def test_every_alert_is_documented():
    assert {rule["alert"] for rule in rules()} == {story.alert for story in STORIES}
    headings = re.findall(r"^### (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket") and rule["annotations"]["summary"].endswith(".")
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
    assert headings == [rule["alert"] for rule in rules()], "the runbook has the same alerts in the same order"


def test_commands_of_the_runbook_can_be_typed():
    typed = re.findall(r"(?:^    |`)qmq ([^`\n]+)", RUNBOOK.read_text(), re.MULTILINE)
    own = [line for line in typed if line.split()[0] in PROGRAMS]
    commands = [line.split() for line in typed if line not in own]
    assert len(commands) > 30 and {line.split()[0] for line in own} == {"audit", "prometheus", "inspect", "give-up"}
    for name, *words in commands:
        assert name in COMMANDS, f"qmq {name}"
        known = {f"--{option.name}" for option in COMMANDS[name].options}
        known |= {"--dry-run", "--yes"} if COMMANDS[name].changes else set()
        assert {word.partition("=")[0] for word in words} <= known, f"qmq {name} {words}"


def test_promtool_takes_the_file():
    ended = subprocess.run(["promtool", "check", "rules", RULES], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
