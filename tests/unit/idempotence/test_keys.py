"""Core. Messages share a key exactly if they are the same work for the same group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import qmq
from qmq.idempotence.keys import key_digest, message_key
from tests.unit.idempotence.stores import Handed

NAMES = st.text(st.sampled_from("ab%25"), min_size=1, max_size=6)


def test_key_is_subject_group_and_id():
    assert message_key(Handed("id-1"), None) == "order.paid%stock%id-1"


def test_key_may_come_from_an_extractor():
    message = Handed("id-1", properties={"orderNo": "42"})
    assert message_key(message, lambda message: str(message["orderNo"])) == "order.paid%stock%42"


@pytest.mark.parametrize("value, text", [(42, "42"), (0, "0"), (True, "true"), (1.5, "1.5")])
def test_key_of_a_property_is_its_text(value, text):
    """Clients before types of properties delivered texts; their keys stay valid."""
    message = Handed("id-1", properties={"orderNo": value})
    assert message_key(message, lambda message: message["orderNo"]) == f"order.paid%stock%{text}"


@pytest.mark.parametrize("key", [None, print, object(), ""], ids=["none", "function", "object", "empty"])
def test_key_without_text_fails_the_message(key):
    """An object's text holds its address, which a later object may have: that message would count as handled."""
    with pytest.raises(qmq.InvalidRequest, match="key of message id-1 is a str|key of message id-1 is empty"):
        message_key(Handed("id-1"), lambda _: key)


@given(NAMES, NAMES, NAMES, NAMES, NAMES, NAMES)
def test_no_two_messages_share_a_key(subject, group, id, other_subject, other_group, other_id):
    one, other = (subject, group, id), (other_subject, other_group, other_id)
    keys = [message_key(Handed(id, subject, group), None) for subject, group, id in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


@pytest.mark.parametrize(
    "one, other",
    [
        pytest.param("x" * 300 + "1", "x" * 300 + "2", id="longer than a column, other at the end"),
        pytest.param("Foo", "foo", id="case"),
        pytest.param("a", "a ", id="blank at the end"),
        pytest.param("e", "é", id="accent"),
    ],
)
def test_keys_equal_to_databases_differ_in_digest(one, other):
    assert key_digest(one) != key_digest(other)
    assert len(key_digest(one)) == 64
