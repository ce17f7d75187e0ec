"""Core. Session states: drawing, facts, and illegal events."""

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
from qmq.errors import BrokenInvariant, IllegalTransition
from qmq.states import draw

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
