"""Core. Parsing of answers: QMQ's three styles, errors of the HTTP side, answers of other servers."""

from __future__ import annotations

import pytest

from qmq.tools.call import Exit, read_answer


@pytest.mark.parametrize(
    "http, raw, exit_status, message, data",
    [
        pytest.param(200, {"status": 0, "message": "", "data": "x"}, Exit.DONE, "", "x", id="standard"),
        pytest.param(200, {"status": -1, "message": "no", "data": None}, Exit.REFUSED, "no", None, id="refused"),
        pytest.param(200, {"status": -2, "message": "?", "data": None}, Exit.UNKNOWN, "?", None, id="unknown"),
        pytest.param(200, {"status": -3, "message": "later", "data": None}, Exit.UNREACHABLE, "later", None, id="wait"),
        pytest.param(200, {"data": {"name": "s"}}, Exit.DONE, "", {"name": "s"}, id="map"),
        pytest.param(200, {"error": "there", "data": 1}, Exit.REFUSED, "there", 1, id="map, refused"),
        pytest.param(200, {"error": "?", "status": -2}, Exit.UNKNOWN, "?", None, id="map, unknown"),
        pytest.param(200, [], Exit.DONE, "", [], id="raw list"),
        pytest.param(200, {"subject": "s", "version": 1}, Exit.DONE, "", {"subject": "s", "version": 1}, id="raw"),
        pytest.param(401, {"error": {"message": "who?", "action": "ask"}}, Exit.REFUSED, "who?: ask", None, id="401"),
        pytest.param(413, {"status": -1, "message": "too long"}, Exit.REFUSED, "too long", None, id="413"),
        pytest.param(503, {"error": {"message": "away"}}, Exit.UNREACHABLE, "away", None, id="503"),
        pytest.param(504, {"error": {"message": "who knows"}}, Exit.UNKNOWN, "who knows", None, id="504"),
        pytest.param(500, {"error": {"message": "oh"}}, Exit.UNKNOWN, "oh", None, id="500"),
    ],
)
def test_answer_means(http, raw, exit_status, message, data):
    answer = read_answer(http, raw)
    assert (answer.exit, answer.message, answer.data) == (exit_status, message, data) and answer.raw == raw


@pytest.mark.parametrize(
    "http, raw", [(200, None), (200, "x"), (404, {}), (502, None), (404, []), (500, {"detail": 1})]
)
def test_unknown_answers_are_rejected(http, raw):
    assert read_answer(http, raw) is None
