"""Shell. The watchdog's statements on real databases: indexes, locked rows, bounded pages."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from sqlalchemy import text

from qmq.outbox.claims import (
    AdoptClaims,
    ClaimRows,
    Disown,
    Due,
    Page,
    Postponed,
    ReadClaims,
    ReadPage,
    Released,
    SettleClaims,
    Settled,
)
from qmq.outbox.statements import CLAIMS_MAX
from qmq.watchdog.database import Outbox, Questions, open_source
from tests.integration.cluster_world import until
from tests.integration.watchdog_world import TABLE

SUBJECT = "order.paid"
NOW, LATER = Due(None, 0), Due(None, 3_600_000)


@pytest.fixture
def outbox(application):
    return Outbox(application.engine, application.source)


def names(count, name="m"):
    return [f"{name}-{number}" for number in range(count)]


def ids_of(page):
    return [row.id for row in page.rows]


def plan_of(application, statement):
    """Return the database's plan of a statement as text."""
    explain = "EXPLAIN QUERY PLAN" if application.engine.dialect.name == "sqlite" else "EXPLAIN"
    with application.engine.begin() as connection:
        return "\n".join(str(tuple(row)) for row in connection.execute(text(f"{explain} {statement}")))


def test_row_too_young_for_a_scan_is_not_claimed(application):
    """Its id was another row's, whose commit the database has lost since the scan."""
    application.write(SUBJECT, names(2))
    outbox = Outbox(application.engine, application.source)
    page = outbox.do(ReadPage(None, 10))
    old, young = ids_of(page)
    later = Outbox(application.engine, replace(application.source, age_ms=3_600_000))
    with application.engine.begin() as connection:
        connection.execute(text(f"UPDATE {TABLE} SET update_time = '2020-01-01 00:00:00' WHERE id = {old}"))
    assert later.do(ClaimRows({"a": [old, young]}, [], [])) == {"a": [old]}
    assert later.do(ClaimRows({}, [(young, "wrong")], [Postponed([young], LATER, "nobody")])) == {}
    assert ids_of(outbox.do(ReadPage(None, 10))) == [young]


def test_scans_use_an_index(application, outbox):
    application.write(SUBJECT, names(3_000))
    with application.engine.begin() as connection:
        connection.execute(text(f"UPDATE {TABLE} SET claim = '1:1:1:g1' WHERE id <= 10"))
        connection.execute(text(f"UPDATE {TABLE} SET status = -2 WHERE id > 10 AND id <= 20"))
    refresh = {"postgresql": f"ANALYZE {TABLE}", "mysql": f"ANALYZE TABLE {TABLE}", "mariadb": f"ANALYZE TABLE {TABLE}"}
    with application.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(refresh.get(application.engine.dialect.name, f"ANALYZE {TABLE}")))
    behind = " AND update_time >= '2026-01-01' AND (update_time > '2026-01-01' OR id > 5)"
    with application.engine.connect() as connection:
        pages = [outbox.statements(connection).page_statement(part, 100) for part in ("", behind)]
    for statement in pages:
        plan = plan_of(application, statement)
        assert "qmq_msg_queue_due" in plan and "filesort" not in plan, plan
    claims = plan_of(application, f"SELECT claim, MIN(update_time) FROM {TABLE} WHERE claim > '' GROUP BY claim")
    assert "qmq_msg_queue_claim" in claims, claims
    claims = plan_of(application, f"SELECT claim, MIN(update_time) FROM {TABLE} WHERE claim IS NOT NULL GROUP BY claim")
    assert "qmq_msg_queue_claim" in claims, claims
    parked = plan_of(application, f"SELECT 1 FROM {TABLE} WHERE status < 0 LIMIT 100")
    assert "qmq_msg_queue_due" in parked, parked


def test_pages_cover_the_whole_table(application, outbox):
    application.write(SUBJECT, names(25))
    seen, after = [], None
    while True:
        page = outbox.do(ReadPage(after, 10))
        seen += ids_of(page)
        if (after := page.after) is None:
            break
    assert len(seen) == 25 == len(set(seen))


def test_page_is_bounded_and_has_a_row(application, outbox):
    application.write_rows(['{"messageId": "x", "subject": "s", "attrs": {"a": "%s"}}' % ("x" * 3_000_000)] * 3)
    first = outbox.do(ReadPage(None, 10))
    assert len(first.rows) == 1 and first.after is not None


def test_a_password_may_have_any_letters(application):
    if application.source.kind != "mariadb":
        return
    with application.engine.begin() as connection:
        connection.execute(text("CREATE USER IF NOT EXISTS 'слон'@'127.0.0.1' IDENTIFIED BY 'пароль'"))
        connection.execute(text("GRANT ALL ON *.* TO 'слон'@'127.0.0.1'"))
    engine = open_source(replace(application.source, user="слон", password="пароль"))
    assert Outbox(engine, application.source).do(ReadClaims()) == []
    engine.dispose()


def test_young_rows_are_left_to_their_application(application):
    old = Outbox(application.engine, replace(application.source, age_ms=60_000))
    application.write(SUBJECT, ["young"])
    assert old.do(ReadPage(None, 10)) == Page([], None)


def test_claim_takes_each_free_row_once(application, outbox):
    application.write(SUBJECT, names(6))
    ids = ids_of(outbox.do(ReadPage(None, 10)))
    assert outbox.do(ClaimRows({"1:1:1:g1": ids[:4]}, [], [])) == {"1:1:1:g1": ids[:4]}
    assert outbox.do(ClaimRows({"2:1:1:g1": ids}, [], [])) == {"2:1:1:g1": ids[4:]}
    assert ids_of(outbox.do(ReadPage(None, 10))) == []


def test_a_row_that_another_transaction_locks_is_left_out(application, outbox):
    if application.engine.dialect.name == "sqlite":
        return  # SQLite locks the whole file
    application.write(SUBJECT, names(3))
    ids = ids_of(outbox.do(ReadPage(None, 10)))
    with application.engine.begin() as other:
        other.execute(text(f"SELECT id FROM {TABLE} WHERE id = {ids[1]} FOR UPDATE"))
        assert outbox.do(ClaimRows({"1:1:1:g1": ids}, [], [])) == {"1:1:1:g1": [ids[0], ids[2]]}


def test_write_of_a_deposed_leader_changes_no_row(application, outbox):
    application.write(SUBJECT, names(2))
    [first, second] = ids_of(outbox.do(ReadPage(None, 10)))
    outbox.do(ClaimRows({"1:1:1:g1": [first, second]}, [], []))
    [known] = outbox.do(ReadClaims())
    assert known.claim == "1:1:1:g1" and known.age_ms < 60_000
    rows = outbox.do(AdoptClaims("1:1:1:g1", "1:1:2:g1"))
    assert [row.id for row in rows] == [first, second] and not rows[0].problem
    late = SettleClaims([Settled("1:1:1:g1", [first], [(second, "?")])], [Released("1:1:1:g1", [first], NOW, "?", 1)])
    outbox.do(late)
    assert [(row.status, row.error, row.claim) for row in application.rows()] == [(0, 0, "1:1:2:g1")] * 2
    assert outbox.do(AdoptClaims("1:1:1:g1", "1:1:3:g1")) == []
    outbox.do(SettleClaims([Settled("1:1:2:g1", [first], [(second, "no broker takes it")])], []))
    [left] = application.rows()
    assert (left.id, left.status, left.reason, left.claim) == (second, -2, "no broker takes it", None)


def test_released_and_postponed_rows_wait_and_come_again(application, outbox):
    application.write(SUBJECT, names(4))
    ids = ids_of(outbox.do(ReadPage(None, 10)))
    outbox.do(ClaimRows({"1:1:1:g1": ids[:2]}, [], [Postponed(ids[2:], LATER, "readonly")]))
    outbox.do(
        SettleClaims(
            [], [Released("1:1:1:g1", ids[:1], NOW, "later", 1), Released("1:1:1:g1", ids[1:2], LATER, "?", 0)]
        )
    )
    assert ids_of(outbox.do(ReadPage(None, 10))) == ids[:1]
    assert [(row.error, row.reason) for row in application.rows()][:2] == [(1, "later"), (0, "?")]


def test_postponed_rows_keep_their_order(application, outbox):
    application.write(SUBJECT, names(4))
    page = outbox.do(ReadPage(None, 10))
    ids, due = ids_of(page), Due(page.clock, 1_200)
    outbox.do(ClaimRows({"1:1:1:g1": ids[:1]}, [], [Postponed(ids[2:], due, "readonly")]))
    outbox.do(ClaimRows({}, [], [Postponed(ids[1:2], due, "readonly")]))
    time.sleep(0.1)
    outbox.do(SettleClaims([], [Released("1:1:1:g1", ids[:1], due, "readonly", 0)]))
    assert outbox.do(ReadPage(None, 10)).rows == []
    until(lambda: ids_of(outbox.do(ReadPage(None, 10))) == ids, "all rows are due, in their order")


def test_claims_over_the_answer_limit_are_read_on(application, outbox):
    application.write(SUBJECT, names(CLAIMS_MAX + 5))
    ids = ids_of(outbox.do(ReadPage(None, 1_000)))
    outbox.do(ClaimRows({f"1:{number:x}:1:g1": [id] for number, id in enumerate(ids)}, [], []))
    first = outbox.do(ReadClaims())
    rest = outbox.do(ReadClaims(first[-1].claim))
    assert len(first) == CLAIMS_MAX and len({found.claim for found in first + rest}) == CLAIMS_MAX + 5


def test_questions_count_list_and_retry(application, outbox):
    questions = Questions(application.engine, application.source)
    application.write(SUBJECT, names(3))
    application.write_rows(["poison"])
    ids = ids_of(outbox.do(ReadPage(None, 10)))
    outbox.do(ClaimRows({"1:1:1:g1": ids[:1]}, [(ids[3], "cannot be read")], []))
    stats = questions.stats()
    assert (stats.pending, stats.claimed, stats.parked) == (3, 1, 1) and stats.oldest_s < 3_600
    stuck = questions.stuck(older_s=0, limit=10)
    assert sorted(row.state for row in stuck) == ["claimed", "parked", "waiting", "waiting"]
    assert (stuck[0].reason, stuck[0].id) == ("cannot be read", ids[3])
    assert {row.message_id for row in stuck[1:]} == {"m-0", "m-1", "m-2"}
    assert [row.id for row in questions.stuck(older_s=3_600, limit=10)] == [ids[3]]
    assert questions.retry(None) == 1 and questions.stats().parked == 0
    assert questions.retry(ids[:1]) == 0, "a claimed row is left to its claim"


def test_undecodable_rows_are_parked_and_retried(application, outbox, monkeypatch):
    monkeypatch.setattr("qmq.outbox.statements.DISOWNED_MAX", 2)
    application.write(SUBJECT, names(5))
    ids = ids_of(outbox.do(ReadPage(None, 10)))
    outbox.do(ClaimRows({"": ids[:1], "by hand": ids[1:4], "1:1:1:g1": ids[4:]}, [], []))
    assert [found.claim for found in outbox.do(ReadClaims())] == ["", "1:1:1:g1", "by hand"]
    assert [outbox.do(Disown("by hand", "of no watchdog")) for _ in range(3)] == [2, 1, 0]
    assert outbox.do(Disown("", "of no watchdog")) == 1
    assert [found.claim for found in outbox.do(ReadClaims())] == ["1:1:1:g1"]
    questions = Questions(application.engine, application.source)
    assert questions.stats().parked == 4 and questions.retry(None) == 4
    assert sorted(ids_of(outbox.do(ReadPage(None, 10)))) == ids[:4]


def test_retry_of_all_rows_terminates(application, outbox, monkeypatch):
    questions = Questions(application.engine, application.source)
    application.write_rows(["poison"] * 3)
    ids = ids_of(outbox.do(ReadPage(None, 10)))
    park = ClaimRows({}, [(id, "cannot be read") for id in ids], [])
    outbox.do(park)
    retry, rounds = questions._retry, []

    def retry_beside_a_drain(part):
        rounds.append(part)
        assert len(rounds) < 300, "the retry does not end"
        done = retry(part)
        outbox.do(park)
        time.sleep(0.01)
        return done

    time.sleep(0.01)
    monkeypatch.setattr(questions, "_retry", retry_beside_a_drain)
    assert questions.retry(None) >= 3
