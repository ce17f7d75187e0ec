"""Core. Session states: drawing, facts, illegal events, and the history of a real session."""

from __future__ import annotations

from textwrap import indent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.client import session_life
from qmq.client.session_life import (
    SESSION,
    Closed,
    Resting,
    SessionEvent,
    SessionLife,
    SessionState,
    Subscribed,
    Subscribing,
    Unsubscribed,
)
from qmq.errors import BrokenInvariant, IllegalTransition, NotMaster
from qmq.states import draw
from tests.support.waiting import until_async
from tests.unit.client.world import cluster, consumer_of, fill, ns, pulling

FACTS = {
    SessionState.UNSUBSCRIBED: Unsubscribed,
    SessionState.SUBSCRIBING: Subscribing,
    SessionState.SUBSCRIBED: lambda: Subscribed(7, 10_000),
    SessionState.DRAINING: lambda: Subscribed(7, 10_000),
    SessionState.RESTING: lambda: Resting(1),
    SessionState.CLOSED: Closed,
}


def test_the_drawing_is_the_table():
    assert indent(draw(SESSION), "    ") in str(session_life.__doc__)


@given(st.lists(st.sampled_from(SessionEvent), max_size=30))
def test_facts_match_states_and_illegal_events_raise(events):
    life = SessionLife()
    for event in events:
        state, now = life.state, life.now
        if life.may(event):
            life.enter(event, FACTS[SESSION.after(state, event)](), at_ms=1)
        else:
            with pytest.raises(IllegalTransition):
                life.enter(event, Unsubscribed(), at_ms=1)
            assert (life.state, life.now) == (state, now)
        assert isinstance(life.now, type(FACTS[life.state]()))
        assert life.state is not SessionState.CLOSED or not life.may(SessionEvent.ASKED), "it ends once"


def test_a_state_takes_no_facts_of_another():
    life = SessionLife()
    with pytest.raises(BrokenInvariant):
        life.enter(SessionEvent.ASKED, Resting(1), at_ms=0)
    assert life.state is SessionState.UNSUBSCRIBED and not life.history


async def test_session_keeps_its_history():
    async with cluster("g1") as (metaserver, [broker]):
        fill(broker, range(3))
        consumer = consumer_of(metaserver)
        async with consumer.pull("a", group="g", start="earliest") as puller:
            assert ns(await puller.pull(3, timeout=60)) == [0, 1, 2]
            [subscription] = consumer._connections._subscriptions
            session = next(found for (_, source), found in subscription._sessions.items() if source == "a")
            broker.refuse_with = NotMaster("another one is")
            broker.cut()
            await until_async(lambda: session._life.state is SessionState.RESTING)
            broker.refuse_with = None
            await until_async(lambda: session._life.state is SessionState.SUBSCRIBED)
        events = [change.event for change in session.history]
        assert events[:6] == ["ASKED", "ACCEPTED", "REFUSED", "LOST", "ASKED", "REFUSED"]
        assert events[-5:] == ["RESTED", "ASKED", "ACCEPTED", "STOPPED", "CLOSED"]


async def test_draining_session_acks_and_pulls_no_more():
    async with pulling(3) as (broker, puller):
        messages = await puller.pull(3, timeout=60)
        await until_async(lambda: len(broker.pulls) == 6)  # one was answered: four and the mailbox's are open again
        subscription = puller._subscription
        subscription.stop()
        states = {session._life.state for session in subscription._sessions.values()}
        assert states == {SessionState.DRAINING}
        fill(broker, range(3, 6))
        session = subscription._sessions["g1", "a"]
        await until_async(lambda: session._life.now.pulls < 4)  # a pull in flight brought these
        await puller.ack(messages)
        await subscription.flush()
        assert all(message.is_settled for message in messages) and len(broker.pulls) == 6
