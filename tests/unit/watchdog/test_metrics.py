"""Shell. A watchdog's page of metrics: counters of drains, and rows by state."""

from __future__ import annotations

from dataclasses import fields

from qmq.outbox.drain_plan import Counts
from qmq.watchdog.database import Stats
from tests.support.pages import DATABASE, samples, watchdog_page


def test_drain_counters_are_on_the_page():
    names = [field.name for field in fields(Counts)]
    page = watchdog_page(Counts(**{name: 10 + at for at, name in enumerate(names)}))
    found = {name: samples(page, f"qmq_watchdog_{name}_total") for name in names}
    assert found == {name: [({"database": DATABASE}, 10.0 + at)] for at, name in enumerate(names)}


def test_metrics_count_rows_by_state_and_age():
    page = watchdog_page(Counts(), Stats(pending=5, claimed=3, parked=2, oldest_s=90.5, by_age={60: 4, 3600: 1}))
    rows = {labels["state"]: count for labels, count in samples(page, "qmq_watchdog_rows")}
    assert rows == {"pending": 5, "claimed": 3, "parked": 2}
    assert samples(page, "qmq_watchdog_oldest_seconds") == [({"database": DATABASE}, 90.5)]
    older = {labels["seconds"]: count for labels, count in samples(page, "qmq_watchdog_rows_older")}
    assert older == {"60": 4, "3600": 1}
