"""Shell. A new operator with the console alone: answers to questions within a minute, then changes."""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest

from tests.integration.cluster_world import until
from tests.integration.console_story import bad_night, something_late
from tests.support.chromium import Chromium

MINUTE_S = 60.0


@pytest.fixture(scope="module")
def night(tmp_path_factory):
    """The cluster, and a browser in which an operator has logged in."""
    folder = tmp_path_factory.mktemp("night")
    with bad_night(folder) as cluster, Chromium(folder / "profile") as browser:
        browser.open(f"{cluster.metaserver}/console")
        browser.type(cluster.manage("AddToken", name="anna", role="operator")["token"])
        assert "anna · operator" in browser.follow()
        yield cluster, browser


@contextmanager
def within_a_minute(browser):
    """Check the time of an answer, which is looked for from the overview."""
    began = time.monotonic()
    browser.click("qmq")
    yield
    assert time.monotonic() - began < MINUTE_S


def test_overview_answers_which_group_is_readonly(night):
    _, browser = night
    with within_a_minute(browser):
        text = browser.text()
        assert "1 of 2 accept produces" in text.replace("2 of 3", "1 of 2")
        assert "g2 readonly" in text and "an operator marked it: UnMarkReadonlyBrokerGroup ends it" in text
        assert text.index("g2 readonly") < text.index("accepts produces")
        assert "It is readonly." in browser.click("g2") and "All logs end alike and are equal" in browser.text()


def test_consumers_page_answers_which_group_is_behind(night):
    _, browser = night
    with within_a_minute(browser):
        text = browser.click("Consumers")
        assert "order.changed billing 40" in text and "no consumer" in text.replace("_", " ")
        assert datetime.now(UTC).strftime("%Y-%m-%d") in text
        text = browser.click("order.changed")
        assert "billing 40" in text and "search 0" in text


def test_audit_page_answers_for_last_night(night):
    _, browser = night
    with within_a_minute(browser):
        text = browser.click("Nightly audit")
        assert "All 3 broker groups were proven equal by their last run" in text and "22 h" in text
        assert text.count("audit@mq1") == 9


def test_operator_change_is_found_by_time(night):
    _, browser = night
    now = datetime.now(UTC)
    with within_a_minute(browser):
        browser.click("Audit trail")
        browser.fill("since", (now - timedelta(minutes=10)).strftime("%Y-%m-%dT%H:%M"))
        browser.fill("until", (now + timedelta(minutes=1)).strftime("%Y-%m-%dT%H:%M"))
        browser.fill("name", "MarkReadonlyBrokerGroup")
        text = browser.click("Show")
        assert "cluster 127.0.0.1 MarkReadonlyBrokerGroup brokerGroup=g2" in text and "AddDb" not in text
        browser.fill("until", (now - timedelta(minutes=9)).strftime("%Y-%m-%dT%H:%M"))
        assert "No change in this time" in browser.click("Show")


def test_dead_letters_are_shown_with_their_error(night):
    _, browser = night
    with within_a_minute(browser):
        assert "mail.wanted mail 0" in browser.click("Consumers"), "dead letters are shown without a lag, too"
        text = browser.click("3")
        assert all(f"no address for order {number}" in text for number in (4711, 4712, 4713))


def test_delayed_page_answers_for_late_messages(night):
    cluster, browser = night
    with something_late(cluster), within_a_minute(browser):
        text = browser.click("Delayed")
        assert "1 message is due and not sent yet" in text and "nowhere" in text
    until(lambda: not cluster.manage("DelayStats")["groups"][0]["dueMessages"], "it went")
    with within_a_minute(browser):
        text = browser.click("Delayed")
        assert "Nothing is late." in text
        assert "report.wanted" in text and "0 3 * * * Europe/Berlin" in text


def do(browser, link, **fields):
    """Follow a change's link, fill its form, confirm the plan; return the texts of the plan and the outcome."""
    browser.click(link)
    for name, text in fields.items():
        browser.fill(name, text)
    plan = browser.click("Show the plan")
    assert "Reaches" in plan, plan
    return plan, browser.click("Do it")


def test_console_action_is_planned_and_in_the_trail(night):
    """Unmark, redrive, pause a consumer group, send a parked row again, swap: each plan counts its reach."""
    cluster, browser = night
    browser.open(f"{cluster.metaserver}/console/group?name=g2")
    plan, done = do(browser, "UnMarkReadonlyBrokerGroup…")
    assert "1 group" in plan and "Done." in done
    until(
        lambda: all(row["writable"] for row in cluster.manage("ListBrokerGroups", details="true")),
        "dead letters of g2 can go back",
    )
    browser.open(f"{cluster.metaserver}/console/messages?subject=mail.wanted&dead=mail")
    plan, done = do(browser, "Redrive…", limit="2")
    assert "moved" in plan and "Reaches 1 subject" in plan and "Done." in done, (plan, done)
    browser.open(f"{cluster.metaserver}/console/consumers?subject=order.changed")
    plan, done = do(browser, "OnOffline…", consumerGroup="billing", state="offline")
    assert "Reaches 1 subject" in plan and "Done." in done
    browser.open(f"{cluster.metaserver}/console/outbox")
    plan, done = do(browser, "retry…")
    assert "sentAgain" in plan and "Done." in done
    browser.click("Log out")
    browser.type(cluster.manage("AddToken", name="boss", role="admin")["token"])
    browser.follow()
    browser.open(f"{cluster.metaserver}/console/group?name=g1")
    plan, done = do(browser, "SwapRoles…")
    assert "1 group" in plan and "Done." in done
    trail = browser.click("Audit trail")
    for row in ("anna 127.0.0.1 Redrive", "anna 127.0.0.1 OnOffline", "anna 127.0.0.1 OutboxRetry"):
        assert row in trail
    assert "boss 127.0.0.1 SwapRoles" in trail
