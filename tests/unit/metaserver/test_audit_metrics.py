"""Shell. The audit's gauges of a metaserver: the ledger's content, at most a minute old, or that it is unreadable."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from qmq.ledger import FINDINGS, PROVEN, Entry, Ledger
from qmq.metaserver.console.nights import Nights
from qmq.metaserver.observability.collectors import AuditMetrics

NIGHT = Entry("2026-11-21T01:00:00Z", 1_000_000, "g1", PROVEN, verified=700, chain="00ff", frame=650, ends={"a": 7})
UP = "qmq_metaserver_audit_ledger_up"


def samples(metrics):
    return {
        (metric.name, sample.labels.get("broker_group", ""), sample.labels.get("verdict", "")): sample.value
        for metric in metrics.read()
        for sample in metric.samples
    }


async def looked(metrics):
    """Return the metrics after the reading that the previous scrape triggered."""
    assert not samples(metrics), "a scrape does not wait for the reading"
    task = asyncio.create_task(metrics.scrapes.run())
    while (UP, "", "") not in (found := samples(metrics)):
        await asyncio.sleep(0)
    task.cancel()
    return found


async def test_ledger_readings_become_metrics(tmp_path):
    ledger = Ledger(tmp_path)
    for entry in (NIGHT, replace(NIGHT, group="g2", verdict=FINDINGS, at_ms=2_000_000)):
        ledger.append(entry)
    found = await looked(AuditMetrics(partial(Nights(tmp_path).status, now_ms=3_000_000)))
    assert found[UP, "", ""] == 1
    assert found["qmq_audit_verified_timestamp_seconds", "g1", ""] == 1000
    assert found["qmq_audit_age_seconds", "g1", ""] == 2000
    assert {group for name, group, verdict in found if verdict == FINDINGS and found[name, group, verdict]} == {"g2"}


async def test_unreadable_ledger_is_logged_once(tmp_path, caplog):
    metrics = AuditMetrics(partial(Nights(tmp_path / "ledger").status, now_ms=3_000_000))
    assert await looked(metrics) == {(UP, "", ""): 0}
    assert "is no directory" in caplog.text
    Ledger(tmp_path / "ledger").append(NIGHT)
    await metrics._look()
    assert samples(metrics)[UP, "", ""] == 1
    caplog.clear()
    path = tmp_path / "ledger" / "g1.jsonl"
    path.write_bytes(path.read_bytes().replace(b"700", b"701"))
    (tmp_path / "ledger" / "g2.jsonl").touch()
    (tmp_path / "ledger" / "g2.jsonl").unlink()  # another folder
    for _ in range(2):
        await metrics._look()
        assert samples(metrics) == {(UP, "", ""): 0}
    assert caplog.text.count("cannot be read") == 1
