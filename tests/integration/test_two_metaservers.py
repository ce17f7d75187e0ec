"""Shell. Two metaservers on one database behind nginx: either may end at any time without an effect on clients."""

from __future__ import annotations

import asyncio
import re
import signal
import time

import httpx
import pytest
from sqlalchemy import text

import qmq
from qmq.deploy.control import broker_state, manage
from qmq.deploy.processes import suspend
from qmq.metaserver.console.pages import PAGES
from qmq.metaserver.storage.engine import connect
from tests.integration.cluster_world import until
from tests.integration.installation_world import STEADY_S, TOKEN, Observers, end, installation
from tests.support.promises import Tries


@pytest.fixture(scope="module")
def world(mariadb, tmp_path_factory):
    url = mariadb.create_database()
    with installation(tmp_path_factory.mktemp("two"), url) as running:
        yield running


def steady(seconds=STEADY_S):
    """Let the observers work for a while."""
    time.sleep(seconds)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize("number", [0, 1])
def test_weakness_11_metaserver_ends_under_load_unnoticed(world, number, how):
    """Weakness 11: QMQ's metaserver marks a broker down that moves to another metaserver.

    Weaknesses 23 and 24: no graceful stop, so that every planned stop looks like a crash.
    """
    service = world.metaservers[number]
    for _ in (tries := Tries(3.0, "each message is stored")):
        with Observers(world) as observers:
            until(lambda: observers.sent > 20 and observers.looks > 2, "the observers are at work")
            end(service, how)
            steady()
            sent = observers.sent
            service.start()
            until(lambda: world.answers(service.url), "it is back")
            steady()
        assert observers.problems == []
        assert observers.sent > sent > 20
        tries.took(observers.slowest_s)


def test_paused_metaserver_marks_no_broker_down(world):
    service = world.metaservers[0]
    with Observers(world) as observers:
        until(lambda: observers.sent > 20 and observers.looks > 2, "the observers are at work")
        suspend(service.pid)
        try:
            other = world.metaservers[1]
            for _ in range(30):
                assert world.writable(other.url) and all(world.up(other.url).values())
                time.sleep(0.2)
        finally:
            service.signal(signal.SIGCONT)
        until(lambda: world.answers(service.url), "it goes on")
        steady()
    changes = [problem for problem in observers.problems if "down" in problem or "writable" in problem]
    assert changes == [] and not any("message" in problem for problem in observers.problems)


def test_weakness_11_restarts_keep_a_group_down(world):
    """Weakness 11: after a restart, QMQ's metaserver never marks a silent group down."""
    for broker in world.brokers:
        end(broker, signal.SIGKILL)
    world.wait_all(lambda url: not any(world.up(url).values()), "knows that both are down")
    for service in world.metaservers:
        end(service, signal.SIGKILL)
    for service in world.metaservers:
        service.start()
    for service in world.metaservers:
        until(lambda url=service.url: world.answers(url), "it is back")
        assert not any(world.up(service.url).values()) and not world.writable(service.url)
    for broker in world.brokers:
        broker.start()
    world.wait_writable()


def test_metaservers_agree_on_a_broker_of_the_other(world):
    """Weakness 14: slaves are invisible. Here each metaserver shows both brokers, also one that beats at the other."""
    end(world.brokers[1], signal.SIGKILL)
    for service in world.metaservers:
        until(lambda url=service.url: world.up(url) == {"b0": True, "b1": False}, f"{service.name} knows")
        until(lambda url=service.url: not world.writable(url), f"{service.name} knows that g1 is readonly")
        (group,) = world.look(service.url)
        assert "slave_down" in group["readonlyReasons"]
    world.brokers[1].start()
    for service in world.metaservers:
        until(lambda url=service.url: world.writable(url), f"g1 is writable at {service.name}")
        # The master may report its slave before the slave's own metaserver has stored its heartbeat.
        until(lambda url=service.url: world.up(url) == {"b0": True, "b1": True}, f"{service.name} knows")


def test_master_reports_the_disk_of_its_slave(world):
    states = [broker_state(f"127.0.0.1:{broker.control}", TOKEN, timeout_s=20) for broker in world.brokers]
    assert states[0].in_step == [states[1].incarnation] != [""] and states[1].in_step == []


def test_mark_reaches_the_other_metaserver_within_a_second(world):
    first, second = world.metaservers
    for _ in (tries := Tries(1.0, "the other one knows")):
        manage(first.url, TOKEN, "MarkReadonlyBrokerGroup", brokerGroup="g1")
        tries.time(lambda: until(lambda: not world.writable(second.url), "the other one knows"))
        manage(second.url, TOKEN, "UnMarkReadonlyBrokerGroup", brokerGroup="g1")
        until(lambda: world.writable(first.url), "the first one knows")


def test_weakness_12_and_13_only_added_places_count(world):
    """Weakness 12: a dead address can become a group's master. Weakness 13: any process can claim any group."""
    place = world.brokers[0].place
    rows = world.look(world.url, "ListBrokers")
    (row,) = [row for row in rows if row["hostname"] == place["hostname"]]
    assert (row["ip"], row["servePort"]) == (place["ip"], place["servePort"])
    assert {row["role"] for row in rows} == {"MASTER", "SLAVE"}


def test_nginx_lists_both_metaservers(world):
    def named():
        """For two seconds nginx skips a metaserver that did not answer."""
        return {httpx.get(f"{world.url}/meta/address", trust_env=False, timeout=20).text for _ in range(20)}

    until(lambda: named() == {service.grpc for service in world.metaservers}, "both are named")


def test_nginx_repeats_no_change_that_reached_a_metaserver(world):
    text = (world.folder / "qmq.conf").read_text()
    assert "proxy_next_upstream error timeout http_502 http_503;" in text and "non_idempotent" not in text


def test_ended_metaserver_leaves_the_live_list(world):
    first, second = world.metaservers
    mine = first.url.removeprefix("http://")

    def listed():
        return [row["http"] for row in world.look(second.url, "ListMetaservers") if row["up"]].count(mine)

    until(lambda: listed() == 1, "it is listed once, and alive")
    end(first, signal.SIGTERM)
    assert first.exit_status == 0
    until(lambda: not listed(), "it is not listed any more")
    first.start()
    until(lambda: world.answers(first.url), "it is back")


# Both show the same cluster.

PASSING = {"time", "updateTime", "ageSeconds", "answersThis", "rates", "refusals", "peer"}
"""Fields of an answer that differ from one moment to the next, or name the metaserver that answers."""
OWN = "invoice.printed"
PATHS = {"/group": "?name=g1", "/messages": f"?subject={OWN}&dead=billing", "/consumers": f"?subject={OWN}"}


@pytest.fixture(scope="module")
def apart(world):
    """Each metaserver has the heartbeats of one broker; a consumer group has a lag and a dead letter."""
    engine = connect(world.database)

    def heard_at():
        with engine.connect() as connection:
            return set(connection.scalars(text("SELECT metaserver FROM broker_sighting")))

    until(lambda: world.writable(world.url), "g1 is writable")
    while len(heard_at()) < 2:
        end(world.brokers[1], signal.SIGTERM)
        world.brokers[1].start()
        world.wait_writable()
    engine.dispose()
    asyncio.run(_leave_some(world))
    return world


async def _leave_some(world):
    async with qmq.Producer(metaserver=world.url, app="test", token=TOKEN) as producer:
        await producer.send_many(qmq.Message(OWN, {"number": str(number)}) for number in range(10))
    client = qmq.Consumer(metaserver=world.url, app="test", token=TOKEN)
    async with client.pull(OWN, group="billing", start="earliest") as puller:
        first, second, *_ = await puller.pull(4, timeout=20)
        await first.ack()
        await second.dead_letter("no such order")


def lasting(data):
    if isinstance(data, dict):
        return {name: lasting(value) for name, value in data.items() if name not in PASSING}
    return [lasting(value) for value in data] if isinstance(data, list) else data


def agree(look, what):
    """Wait until both metaservers show the same: each has some reports a second later than the other."""
    until(lambda: look(0) == look(1), f"both show the same {what}")
    return look(0)


def test_metaservers_answer_alike(apart):
    def alike(action, **words):
        return agree(lambda at: lasting(apart.look(apart.metaservers[at].url, action, **words)), action)

    until(
        lambda: all(copy["lagBytes"] == 0 and copy["logEnd"] for copy in alike("ListBrokerGroups")[0]["copies"]),
        "no copy is behind",
    )
    for action in ("ReplicaStatus", "ListBrokers", "ListMetaservers", "Settings", "Clients"):
        assert alike(action)
    for action in ("Consumers", "Browse"):
        assert alike(action, subject=OWN)
    (lag,) = [row for row in alike("Lag")["lag"] if (row["subject"], row["group"]) == (OWN, "billing")]
    assert (lag["messages"], lag["deadLetters"]) == (8, 1)
    for service in apart.metaservers:
        assert [check for check in apart.look(service.url, "Doctor")["checks"] if not check["ok"]] == []


def test_pages_show_the_same_at_both(apart):
    """One session, as behind a balancer: each page is right, whichever metaserver is asked."""
    urls = [service.url for service in apart.metaservers]
    token = manage(urls[0], TOKEN, "AddToken", name="anna", role="admin")["token"]
    with httpx.Client(trust_env=False, timeout=20) as browser:

        def logged_in():
            return browser.post(f"{urls[1]}/console/login", data={"token": token, "next": ""}).status_code == 303

        until(logged_in, "the other metaserver has the token")
        for page in PAGES:
            agree(lambda at, path=page.path: page_text(browser, urls[at], path), page.title)
        for url in urls:
            until(lambda url=url: "1 dead letter of billing" in page_text(browser, url, ""), "the overview counts it")
            shown = page_text(browser, url, "")
            assert "2 of 2 up" in shown and "none of its brokers" not in shown


def page_text(browser, url, path):
    """Return a page's text without changing figures: rates, ages, and figures of processes."""
    answer = browser.get(f"{url}/console{path}{PATHS.get(path, '')}")
    assert answer.status_code == 200, answer.text
    page = re.sub(
        r"<li>(?:(?!</li>).)*stands still.*?</li>", "", answer.text, flags=re.DOTALL
    )  # each counts its own minute
    text = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    return re.sub(r"\d[\d.]*( %|%| [KMG]B| m?s\b| min| h\b)|\d+\.\d\b|\d\d:\d\d:\d\d", "N", text)
