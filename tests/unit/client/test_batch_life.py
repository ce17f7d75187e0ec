"""Core. Life of a numbered batch: answers of attempts, and no second group for a possibly stored batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.client.batch import (
    BATCH_LIFE,
    BatchEvent,
    BatchLife,
    BatchState,
    NotStored,
    Stored,
    Unknown,
    answer_of,
)
from qmq.errors import (
    AccessError,
    BrokerReadOnly,
    Fenced,
    IllegalTransition,
    InvalidRequest,
    MessageTooLarge,
    NotMaster,
    NotServed,
    OutcomeUnknown,
    Overloaded,
    QmqError,
)


@pytest.mark.parametrize(
    "error, expected",
    [
        pytest.param(OutcomeUnknown("lost"), Unknown, id="lost"),
        pytest.param(BrokerReadOnly("slave_down"), NotStored, id="readonly"),
        pytest.param(NotMaster("old"), NotStored, id="not master"),
        pytest.param(Overloaded("full"), NotStored, id="overloaded"),
        pytest.param(InvalidRequest("garbage"), NotStored, id="invalid"),
        pytest.param(MessageTooLarge("2 MiB"), NotStored, id="too large"),
        pytest.param(AccessError("token"), NotStored, id="token"),
        pytest.param(NotServed("later"), Unknown, id="says not that nothing was stored"),
        pytest.param(Fenced("newer epoch"), Unknown, id="fenced: maybe written"),
        pytest.param(QmqError("broken"), Unknown, id="unknown error: maybe written"),
    ],
)
def test_error_implies_an_answer(error, expected):
    assert type(answer_of(error)) is expected


ANSWERS = st.sampled_from([Stored(0, 1, []), NotStored(BrokerReadOnly("no slave")), Unknown("lost")])


@given(st.booleans(), st.lists(ANSWERS, max_size=20))
def test_not_stored_needs_the_first_answer(was_taken_over, answers):
    life, before = BatchLife(BATCH_LIFE), []
    if was_taken_over:
        life.on(BatchEvent.TAKEN_OVER)
    for answer in answers:
        life.on(BatchEvent.SENT)
        before.append(type(answer))
        state = life.on(answer)
        if state is BatchState.STORED:
            assert before[-1] is Stored
        if state is BatchState.NOT_STORED:
            assert before == [NotStored] and not was_taken_over
        if state is not BatchState.OUTCOME_UNKNOWN:
            with pytest.raises(IllegalTransition):
                life.on(BatchEvent.SENT)  # it has its outcome
            return
        assert life.may_be_stored and not life.is_in_flight
    if life.state is BatchState.OUTCOME_UNKNOWN:
        assert life.on(BatchEvent.GAVE_UP) is BatchState.GIVEN_UP
