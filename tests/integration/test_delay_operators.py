"""Shell. Operators' lists and changes of delayed messages, with two delay servers and real brokers."""

from __future__ import annotations

import asyncio

import pytest

import qmq
from qmq.errors import OperatorError
from tests.integration.cluster_world import shared_cluster, until
from tests.integration.tools_world import DONE

SUBJECT = "order.unpaid"


cluster = shared_cluster(delay_groups=("d1",))


def send(cluster, count, *, delay, key=None, subject=SUBJECT):
    async def main():
        async with qmq.Producer(metaserver=cluster.metaserver, token=cluster.token, app="shop") as producer:
            messages = [qmq.Message(subject, {"n": str(n)}) for n in range(count)]
            receipts = [await producer.send(message, delay=delay, key=key) for message in messages]
            assert all(receipt.outcome is qmq.Outcome.STORED for receipt in receipts), receipts
            return [str(message.id) for message in messages]

    return asyncio.run(main())


def stats(cluster, **words):
    (group,) = (answer := cluster.manage("DelayStats", **words))["groups"]
    return group, answer


def test_pending_messages_are_counted_listed_and_cancelled(cluster):
    before, _ = stats(cluster)
    ids = send(cluster, 5, delay=3600)
    (by_key,) = send(cluster, 1, delay=7200, key="order 4711")
    group, answer = stats(cluster, subject=SUBJECT)
    assert group["brokerGroup"] == "d1" and group["pendingMessages"] == before["pendingMessages"] + 6
    assert sum(hour["messages"] for hour in answer["hours"]) == 6
    listed = cluster.manage("ListDelayed", subject=SUBJECT)
    assert [row["id"] for row in listed["messages"]] == [*ids, by_key] and not listed["more"]
    assert [row["key"] for row in listed["messages"]] == [""] * 5 + ["order 4711"]
    page = cluster.manage("ListDelayed", subject=SUBJECT, limit=2)
    assert [row["id"] for row in page["messages"]] == ids[:2] and page["more"]
    done = cluster.manage("CancelDelayed", subject=SUBJECT, ids=f"{ids[0]},{ids[1]},nobody", keys="order 4711")
    assert done["ids"] == {ids[0]: "cancelled", ids[1]: "cancelled", "nobody": "unknown"}
    assert done["keys"] == {"order 4711": "cancelled"}
    assert [row["id"] for row in cluster.manage("ListDelayed", subject=SUBJECT)["messages"]] == ids[2:]
    until(lambda: any(row.get("taken") for row in cluster.manage("Rates", brokerGroup="d1")["rates"]), "it has rates")
    results = [row["result"] for row in cluster.manage("AuditTrail", name="CancelDelayed")["rows"]]
    assert results == ["done", "begun"]


def test_late_cancel_reports_the_message_as_sent(cluster):
    (id,) = send(cluster, 1, delay=0.05, subject="soon")
    until(lambda: not cluster.manage("ListDelayed", subject="soon")["messages"], "it is sent")

    def is_sent():
        return cluster.manage("CancelDelayed", subject="soon", ids=id)["ids"] == {id: "sent"}

    until(is_sent, "the delay server says so")


def test_mark_of_the_only_delay_group_warns(cluster):
    marked = cluster.tool("MarkReadonly", "--wait=5", "--yes", brokerGroup="d1")
    assert marked.returncode == DONE and "no other group of delay servers" in marked.stdout + marked.stderr
    until(lambda: not cluster.writable("d1"), "the delay master knows")
    assert cluster.tool("UnMarkReadonly", "--yes", brokerGroup="d1").returncode == DONE
    until(lambda: cluster.writable("d1"), "the mark is gone")
    send(cluster, 1, delay=3600, subject="after.the.mark")


def test_metrics_show_pending_and_late_messages(cluster):
    send(cluster, 3, delay=0.05, subject="measured")
    send(cluster, 1, delay=3600, subject="measured")
    found = until(lambda: _sent(metrics(cluster)), "messages are sent")
    assert found["qmq_delayserver_pending_messages"] >= 1 and found["qmq_delayserver_loaded_messages"] >= 0
    assert found["qmq_delayserver_lateness_seconds_count"] == found["qmq_delayserver_sent_messages_total"]
    assert found["qmq_delayserver_is_master"] == 1 and found["qmq_delayserver_writable"] == 1
    until(lambda: abs(metrics(cluster)["qmq_delayserver_clock_difference_seconds"]) < 1, "clocks are found equal")
    until(lambda: metrics(cluster)["qmq_delayserver_clocks"] == 3, "the clocks of slave and metaserver are heard")
    until(lambda: metrics(cluster)["qmq_delayserver_due_messages"] == 0, "what was due is sent")


def _sent(found):
    return found if found["qmq_delayserver_sent_messages_total"] >= 3 else None


def metrics(cluster):
    found = cluster.metrics(cluster.broker("d1", "master"))
    return {name.partition("{")[0]: value for name, value in found.items()}


def test_swap_keeps_pending_messages(cluster):
    (id,) = send(cluster, 1, delay=3600, subject="kept")
    cluster.swap_roles("d1")
    until(lambda: cluster.writable("d1"), "the new master accepts produces")
    shown = until(lambda: cluster.manage("ListDelayed", subject="kept")["messages"], "the new master lists it")
    assert [row["id"] for row in shown] == [id]
    roles = {row["role"] for row in cluster.manage("ListBrokers", brokerGroup="d1")}
    assert roles == {"DELAY_MASTER", "DELAY_SLAVE"}


def test_invalid_delay_commands_are_refused(cluster):
    with pytest.raises(OperatorError, match="name the messages"):
        cluster.manage("CancelDelayed", subject=SUBJECT)
    with pytest.raises(OperatorError, match="no group g1 of delay servers"):
        cluster.manage("DelayStats", brokerGroup="g1")
    with pytest.raises(OperatorError, match="take delayed messages"):
        cluster.manage("DrainGroup", brokerGroup="d1")
