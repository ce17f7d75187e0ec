"""Core. Names of retry and dead-letter subjects, equal to QMQ's."""

from __future__ import annotations

import pytest

from qmq.errors import InvalidName
from qmq.subjects import check_subject, dead_letter_subject, parse_derived, real_subject, retry_subject


def test_derived_names_equal_qmqs():
    assert retry_subject("order.created", "g1") == "%RETRY%order.created%g1"
    assert dead_letter_subject("order.created", "g1") == "%DEAD_RETRY%order.created%g1"


def test_retry_of_a_retry_keeps_the_subject():
    once = retry_subject("order.created", "g1")
    assert retry_subject(once, "g1") == once
    assert dead_letter_subject(once, "g1") == "%DEAD_RETRY%order.created%g1"
    assert retry_subject("%DEAD_RETRY%order.created%g1", "g1") == once


@pytest.mark.parametrize(
    "name, real",
    [
        pytest.param("order.created", "order.created", id="real"),
        pytest.param("%RETRY%order.created%g1", "order.created", id="retry"),
        pytest.param("%DEAD_RETRY%order.created%g1", "order.created", id="dead letter"),
        pytest.param("%RETRY%%a%%g1%", "a", id="empty parts do not count"),
        pytest.param("%RETRY% a % g1 ", "a", id="parts are trimmed"),
        pytest.param("%RETRY%a%b%g1", "%RETRY%a%b%g1", id="a percent in subject or group: the whole name"),
        pytest.param("%RETRY%a", "%RETRY%a", id="no group: the whole name"),
        pytest.param("%RETRYING%a%g1", "%RETRYING%a%g1", id="another word"),
        pytest.param("RETRY%a%g1", "RETRY%a%g1", id="no percent in front"),
        pytest.param("x%RETRY%a%g1", "x%RETRY%a%g1", id="not in front"),
    ],
)
def test_real_subject_of_a_name(name, real):
    assert real_subject(name) == real
    assert (parse_derived(name) is None) == (real == name)


def test_parts_of_a_derived_name_are_limited_separately():
    """Weakness 5: QMQ's columns are too short for the retry subjects of long names."""
    longest = "s" * 100
    assert check_subject(retry_subject(longest, "g" * 100)) == f"%RETRY%{longest}%{'g' * 100}"
    for subject, group in ((longest + "s", "g"), ("s", "g" * 101), ("a/b", "g"), ("s", "a\nb")):
        with pytest.raises(InvalidName):
            check_subject(retry_subject(subject, group))


@pytest.mark.parametrize("name", ["%RETRY%%a%g1", "%RETRY%a%g1%", "%RETRY% a%g1", "", "a/b", "s" * 101])
def test_name_in_another_form_is_refused(name):
    with pytest.raises(InvalidName):
        check_subject(name)
