"""Shell. Questions about databases, each unusable in its own way."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from types import SimpleNamespace

import pytest
from starlette.responses import JSONResponse

from qmq.errors import NotServed
from qmq.outbox.schema import create_statements
from qmq.watchdog.acceptor import Acceptor
from qmq.watchdog.database import Questions
from qmq.watchdog.settings import Source, WatchdogSettings
from qmq.watchdog.watcher import Reconciliation, Watcher


@pytest.mark.parametrize("error", [UnicodeError("no name of a host"), RuntimeError("a package is missing")])
async def test_driver_error_concerns_its_database_alone(error, tmp_path, monkeypatch):
    source = Source(f"sqlite://here:1/{tmp_path}/shop.db")

    def ask(questions):
        raise error

    monkeypatch.setattr(Questions, "stats", ask)
    leader = SimpleNamespace(is_leader=True, sources=[source], problems={})
    watcher = Watcher(None, leader, None, SimpleNamespace(stats={source.url: 1}))
    await watcher._count(source)
    assert watcher._metrics.stats == {}
    with pytest.raises(NotServed, match=str(error)):
        await watcher._ask(source, ask)


@pytest.mark.parametrize(
    "wrong",
    [
        {"messageId": "\ud800"},
        {"subject": "\ud800"},
        {"attrs": {"qmq_createTime": 10**30}},
        {"attrs": {"qmq_createTime": -(10**30)}},
        {"types": {"x": "\ud800"}, "attrs": {"x": "1"}},
    ],
)
def test_invalid_row_is_listed_as_unchecked(wrong, tmp_path, monkeypatch):
    path, content = tmp_path / "shop.db", {"messageId": "1", "subject": "order.paid"} | wrong
    with sqlite3.connect(path) as database:
        for statement in create_statements("sqlite"):
            database.execute(statement)
        insert = "INSERT INTO qmq_msg_queue (content, status, create_time) VALUES (?, -2, '2020-01-01')"
        database.execute(insert, (json.dumps(content),))
    source = Source(f"sqlite://here:1/{path}")

    async def look():
        async def masters(subject):
            return [("g1", "127.0.0.1:1")]

        leader = SimpleNamespace(is_leader=True, sources=[source], problems={})
        watcher = Watcher(SimpleNamespace(token=""), leader, SimpleNamespace(masters=masters), None)
        shown = await watcher.stuck(database="", older_s=0, limit=10)
        JSONResponse(shown)
        found = await watcher.reconcile(database="", older_s=0, limit=10, seconds=5)
        JSONResponse(found)
        return shown["databases"][0]["rows"], found["databases"][0]["rows"]

    async def asked(self, address, request):
        return SimpleNamespace(messages=[], begin=0, end=0)

    monkeypatch.setattr(Reconciliation, "_ask", asked)
    [shown], [found] = asyncio.run(look())
    assert shown["state"] == found["state"] == "parked" and found["log"] in ("notInLog", "unchecked")


@pytest.mark.parametrize(
    ("ids", "wanted"), [("", None), ("1,2", [1, 2]), (",", "wrong"), ("1,a", "wrong"), ("9" * 5_000, "wrong")]
)
def test_retry_accepts_only_numeric_ids(ids, wanted):
    asked = []

    async def retry(**words):
        asked.append(words["ids"])
        return {}

    settings = WatchdogSettings(metaserver="http://nowhere", token="t")
    acceptor = Acceptor(settings, None, SimpleNamespace(retry=retry), None, None)
    answer = asyncio.run(acceptor._retry(SimpleNamespace(query_params={"database": "d", "ids": ids})))
    assert (answer.status_code, asked) == ((400, []) if wanted == "wrong" else (200, [wanted]))
