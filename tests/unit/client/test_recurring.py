"""Shell. Producer and recurring schedules at several delay groups, over real sockets."""

from __future__ import annotations

import pytest

from qmq import Message
from qmq.codec import decode_message
from qmq.errors import BrokerReadOnly, CallError, InvalidMessage, InvalidRequest, NotServed
from qmq.message import RECUR_NAME
from qmq.types import GroupKind
from tests.support.waiting import until_async
from tests.unit.client.world import delay_groups, producer_of

DAILY = {"name": "daily", "cron": "0 8 * * *", "timezone": "Europe/Berlin"}


def names(server):
    """Return the names of the schedules that a delay group has."""
    return [decode_message(template)[RECUR_NAME] for template in server.subjects["s"]]


def holders(servers, name="daily"):
    return [server.name for server in servers if name in names(server)]


async def test_schedule_is_listed_and_deleted(server, producer):
    message = Message("s", {"kind": "report"}, tags={"t"}, order_key="k")
    put = await producer.put_recurring(message, **DAILY, owner="billing")
    assert (put.subject, put.name, put.owner, put.cron, put.timezone) == (
        "s",
        "daily",
        "billing",
        "0 8 * * *",
        "Europe/Berlin",
    )
    stored = decode_message(server.subjects["s"][0])
    assert (stored["kind"], stored.tags, stored.order_key) == ("report", {"t"}, "k")
    assert message.id is None, "it can be put again"
    assert await producer.list_recurring(subject="s") == [put]
    assert await producer.delete_recurring(subject="s", name="daily") is True
    assert await producer.delete_recurring(subject="s", name="daily") is False


async def test_names_spread_over_groups(metaserver, broker):
    async with delay_groups(metaserver, broker, "d1", "d2", "d3") as servers:
        for _ in range(3):
            async with producer_of(metaserver) as producer:
                for at in range(20):
                    await producer.put_recurring(Message("s"), **DAILY | {"name": f"n{at}"})
        places = [holders(servers, f"n{at}") for at in range(20)]
        assert all(len(place) == 1 for place in places) and len({place[0] for place in places}) == 3


async def test_schedule_stays_in_its_group(metaserver, broker):
    async with delay_groups(metaserver, broker, "d1", "d2", "d3") as servers, producer_of(metaserver) as producer:
        groups = dict(metaserver.delay_groups)

        async def put(*names, cron):
            """Put the schedule while the route has these groups only."""
            metaserver.delay_groups = {name: groups[name] for name in names}
            metaserver.notify()
            version = metaserver.route_now("s", GroupKind.DELAY).version
            await producer.list_recurring(subject="s")
            await until_async(lambda: metaserver.confirmed().get("s") == version)
            await producer.put_recurring(Message("s"), **DAILY | {"cron": cron})

        await put("d2", cron="0 8 * * *")
        for hour in range(10):
            await put("d1", "d2", "d3", cron=f"0 {hour} * * *")
        assert holders(servers) == ["d2"]
        await put("d1", cron="0 8 * * *")
        assert holders(servers) == ["d1", "d2"]
        await put("d1", "d2", "d3", cron="0 9 * * *")
        assert len(holders(servers)) == 1


async def test_readonly_group_gets_no_new_schedule(metaserver, broker):
    async with delay_groups(metaserver, broker, "d1", "d2") as servers, producer_of(metaserver) as producer:
        servers[0].refuse_put_with = BrokerReadOnly("d1 is readonly: operator")
        for at in range(8):
            await producer.put_recurring(Message("s"), **DAILY | {"name": f"n{at}"})
        assert not names(servers[0]) and len(names(servers[1])) == 8
        servers[1].refuse_put_with = BrokerReadOnly("d2 is readonly: disk")
        with pytest.raises(BrokerReadOnly):
            await producer.put_recurring(Message("s"), **DAILY)


async def test_silent_group_blocks_the_change(metaserver, broker):
    async with (
        delay_groups(metaserver, broker, "d1", "d2") as servers,
        producer_of(metaserver, timeout_s=3.0, answer_timeout_s=0.5) as producer,
    ):
        servers[1].is_silent = True
        with pytest.raises(NotServed):
            await producer.put_recurring(Message("s"), **DAILY)
        with pytest.raises(NotServed):
            await producer.list_recurring(subject="s")
        assert holders(servers) == []


async def test_invalid_schedule_is_refused_locally(server, producer):
    with pytest.raises(InvalidMessage, match="an id of its own"):
        await producer.put_recurring(Message("s", id="mine"), **DAILY)
    with pytest.raises(InvalidRequest, match="name of a recurring schedule"):
        await producer.put_recurring(Message("s"), **DAILY | {"name": ""})
    with pytest.raises(InvalidMessage):
        await producer.put_recurring(Message("s", {"x": "y" * 40_000}), **DAILY)
    server.refuse_put_with = InvalidRequest("cron expression 'x': write five fields")
    with pytest.raises(CallError, match="write five fields"):
        await producer.put_recurring(Message("s"), **DAILY | {"cron": "x"})
