"""Shell. Pages of large installations are short, and count the omitted rows."""

from __future__ import annotations

from qmq.ledger import FINDINGS, PROVEN, Entry, Ledger, encode_entry
from qmq.metaserver.actions import Answer, Status
from qmq.metaserver.console import nights as console_nights
from qmq.metaserver.console.nights import Nights
from qmq.metaserver.console.pages import PAGES
from tests.unit.metaserver.console_world import DELAY_GROUP, night, text_of

MANY = 10_000
ROWS_MAX, BYTES_MAX = 400, 400_000
"""Limit for a page: a few tables of a hundred rows."""

LAG = {
    "subject": "s",
    "group": "g",
    "messages": 7,
    "ageSeconds": 9,
    "deadLetters": 0,
    "oldest": 1,
    "causes": {"no_consumer": 7},
    "brokerGroups": {"g1": 7},
}
CONSUMER = {"consumer": "c", "connected": True, "unacked": 1, "delivered": 1, "peer": "10.0.0.1:5", "offline": False}
PROGRESS = {"subject": "s", "group": "g", "brokerGroup": "g1", "firstSequence": 0, "nextSequence": 9, "messages": 1}
GROUP = {
    "groupName": "g",
    "kind": "NORMAL",
    "writable": False,
    "why": ["operator"],
    "copies": [
        {"role": role, "hostname": "h", "servePort": 1, "up": True, "logEnd": 1, "lagBytes": 0}
        for role in ("MASTER", "SLAVE")
    ],
    "readonlySubjects": [],
    "term": 1,
    "tag": "",
    "updateTime": 1,
    "lostTerm": 0,
}
DATABASE = {"url": "mmm://db:1", "room": "default", "table": "t", "status": "ONLINE", "rate": 1, "age": 1}
STUCK_ROW = {"id": 1, "state": "parked", "age": 1.0, "errors": 1, "subject": "s", "messageId": "m", "reason": "r"}
STUCK = {
    "database": "mmm://db:1",
    "room": "default",
    "parked": 200,
    "pending": 0,
    "claimed": 0,
    "oldest": 0.0,
    "rows": [STUCK_ROW] * 100,
}
DELAY = DELAY_GROUP | {"inFlight": {f"g{number}": 1 for number in range(MANY)}, "waiting": []}
MESSAGE = {
    "brokerGroup": "g",
    "sequence": 1,
    "stored": 1,
    "id": "m",
    "tags": [],
    "orderKey": None,
    "bytes": 1,
    "problem": "",
    "properties": {"a": "x" * 300},
}
CHECK = {"name": "n", "ok": False, "found": "f", "remedy": "r"}
WATCHDOG = {"room": "r", "active": "w", "address": "a:1", "term": 1, "updateTime": 1}
SILENT = {f"g{number}": "it does not answer" for number in range(MANY)}
ANSWERS = {
    "ListBrokerGroups": [GROUP] * MANY,
    "Doctor": {"checks": [CHECK] * MANY, "ok": False},
    "Lag": {"lag": [LAG] * MANY, "unasked": SILENT},
    "Consumers": {"groups": [PROGRESS | {"consumers": [CONSUMER] * 10}] * (MANY // 10), "unasked": SILENT},
    "ListDbs": [DATABASE] * MANY,
    "ListWatchdogs": [WATCHDOG] * MANY,
    "OutboxStuck": {"databases": [STUCK] * MANY, "unasked": SILENT},
    "DelayStats": {"groups": [DELAY] * MANY, "hours": [], "unasked": SILENT},
    "ListReadonly": {"marks": [{"subject": "s", "producers": 1}] * MANY},
    "ReplicaStatus": [],
    "Browse": {"messages": [MESSAGE] * 100, "unasked": SILENT},
    "Rates": {"rates": [], "unasked": {}},
}
"""Answers of actions without a limit of their own; the others answer as for an empty installation."""


async def answer_with(console, answers):
    """Log in as an admin; these actions give these answers."""
    await console.log_in("admin")
    run = console.actions.run

    async def answer(name, words, caller):
        return Answer(Status.DONE, data=answers[name]) if name in answers else await run(name, words, caller)

    console.actions.run = answer


QUERIES = {"/group": {"name": "g"}, "/messages": {"subject": "s"}}
ADDRESSES = [(page.path, QUERIES.get(page.path, {})) for page in PAGES]
ADDRESSES += [("/consumers", {"subject": "s"}), ("/consumers", {"all": "yes"})]


REMAINDERS = [
    ("", {}, "Page 1 Next"),
    ("/consumers", {"all": "yes"}, "And 9,900 more, which are less behind."),
    ("/consumers", {"all": "yes"}, "And 9,980 more broker groups did not answer."),
    ("/consumers", {"subject": "s"}, "And 9,900 more consumers: name a consumer group."),
    ("/outbox", {}, "And 9,900 more databases"),
    ("/outbox", {}, "And 9,900 more rooms"),
    ("/outbox", {}, "And 9,999 more databases have rows of their own"),
    ("/doctor", {}, "And 9,900 more that are wrong"),
    ("/delayed", {}, "And 9,900 more groups of delay servers."),
    ("/group", {"name": "g"}, "And 9,900 more subjects"),
    ("/messages", {"subject": "s"}, "There may be more. These are the newest 100"),
    ("/messages", {"subject": "s", "since": "2026-01-31T14:05"}, "These are the oldest 100"),
]


async def test_large_pages_are_cut_and_count_the_rest(console):
    await answer_with(console, ANSWERS)
    for path, words in ADDRESSES:
        page = await console.see(path, **words)
        rows = page.count("<tr") + page.count("<p") + page.count("<h3")
        assert rows < ROWS_MAX and len(page) < BYTES_MAX, (path, words, rows, len(page))
    for path, words, remainder in REMAINDERS:
        assert remainder in text_of(await console.see(path, **words)), (path, words)


async def test_consumers_after_many_empty_groups_are_shown(console):
    empty, full = PROGRESS | {"consumers": []}, PROGRESS | {"consumers": [CONSUMER | {"consumer": "the one"}]}
    consumers = {"groups": [empty] * 300 + [full], "unasked": {}}
    await answer_with(console, ANSWERS | {"Consumers": consumers})
    text = text_of(await console.see("/consumers", subject="s"))
    assert "the one" in text and "None is known" not in text


async def test_group_with_findings_comes_first(console, tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    for number in range(300):
        night(ledger, f"g{number:03d}", 1000)
    night(ledger, "g299", 2000, FINDINGS)
    there = [GROUP | {"groupName": f"g{number:03d}"} for number in range(300)]
    await answer_with(console, {"ListBrokerGroups": there})
    console.served._nights = Nights(tmp_path / "ledger")
    page = await console.see("/audit")
    text = text_of(page)
    assert "299 of 300 broker groups were proven equal" in text and "And 200 more groups" in text
    assert text.index("g299") < text.index("g000") and page.count("<tr") < ROWS_MAX


async def test_group_without_audit_is_named(console, tmp_path):
    """A fixed bug: "All are proven" although no run had read the third group."""
    ledger = Ledger(tmp_path / "ledger")
    night(ledger, "g1", 1000)
    await answer_with(console, {})
    console.served._nights = Nights(tmp_path / "ledger")
    await console.running_copies("g1", "g2")
    text = text_of(await console.see("/audit"))
    assert "1 of 2 broker groups were proven equal" in text and "Never audited: g2" in text
    assert "Never audited" not in text_of(await console.see("/audit", group="g1"))
    night(ledger, "g2", 2000)
    night(ledger, "g0", 1)
    text = text_of(await console.see("/audit"))
    assert "All 2 broker groups were" in text and "removed since: g0" in text and "began 55 y" not in text
    assert "run 1" in text_of(await console.see("/audit", group="g0"))


def test_changed_ledgers_only_are_read_again(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "ledger")
    for number in range(150):
        night(ledger, f"g{number:03d}", 1000 + number)
    nights = Nights(tmp_path / "ledger")
    first = nights.shown("", now_ms=10_000)
    assert [row["run"] for row in first["runs"]] == [f"run {1149 - number}" for number in range(100)]
    read = []
    newest = Ledger.newest
    monkeypatch.setattr(Ledger, "newest", lambda self, group, count: read.append(group) or newest(self, group, count))
    night(ledger, "g000", 5000)
    again = nights.shown("", now_ms=20_000)
    assert set(read) == {"g000"} and again["runs"][0]["run"] == "run 5000"
    assert again["status"][0]["ageS"] == 18 and nights.shown("g000", now_ms=20_000)["status"][0]["ageS"] == 15
    (tmp_path / "ledger" / "g001.jsonl").unlink()
    assert nights.shown("", now_ms=20_000)["proven"] == 149
    assert [row["run"] for row in nights.shown("g149", now_ms=20_000)["runs"]] == ["run 1149"]


def test_ledgers_are_checked_after_a_run_or_a_pause(tmp_path, monkeypatch):
    """A stat of each of 2,000 files per page took longer than the rest of the page."""
    ledger, stamps = Ledger(tmp_path / "ledger"), []
    nights, stamp = Nights(tmp_path / "ledger"), Nights._stamp
    monkeypatch.setattr(Nights, "_stamp", lambda self, name: stamps.append(name) or stamp(self, name))
    night(ledger, "g0", 1000)
    night(ledger, "g1", 1000)
    assert [nights.shown("", now_ms=0)["proven"] for _ in range(3)] == [2, 2, 2]
    assert stamps == ["g0", "g1"]
    night(ledger, "g1", 2000, FINDINGS)
    assert nights.shown("", now_ms=0)["proven"] == 1
    with ledger.path("g0").open("ab") as file:  # for example a copied ledger
        file.write(encode_entry(Entry("run 3000", 3000, "g0", FINDINGS)))
    assert nights.shown("", now_ms=0)["proven"] == 1
    monkeypatch.setattr(console_nights, "LOOK_AGAIN_S", 0.0)
    nights = Nights(tmp_path / "ledger")
    assert nights.shown("", now_ms=0)["proven"] == 0
    with ledger.path("g0").open("ab") as file:
        file.write(encode_entry(Entry("run 4000", 4000, "g0", PROVEN)))
    assert nights.shown("", now_ms=0)["proven"] == 1
