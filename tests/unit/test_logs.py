"""Shell. Log lines of our processes: one per event, text or JSON, bounded per cause."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import subprocess
import sys
import threading
import urllib.error
from pathlib import Path
from types import SimpleNamespace

import pytest

import qmq
from qmq.blocking.background import background, lock
from qmq.errors import NotServed, cause_of
from qmq.logs import HANDLED, LINES_MAX, REPEAT_S, Bounded, Json, MessageFields, Text, bounded, shielded


def record(text, *values, lineno=1, at=1000.0, exc_info=None):
    made = logging.LogRecord("qmq.server", logging.WARNING, "a.py", lineno, text, values, exc_info)
    made.created = at
    return made


def failure():
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        return type(error), error, error.__traceback__


@pytest.mark.parametrize("formatter", [Text(), Json()])
def test_event_is_always_one_line(formatter):
    line = formatter.format(record("refused name=%s", "a\nb\r", exc_info=failure()))
    assert len(line.splitlines()) == 1 and "second" in line


def test_an_event_as_json_has_its_fields():
    event = json.loads(Json().format(record("slave fenced term=%d offset=%d", 7, 81920, at=0.5)))
    assert event == {
        "time": "1970-01-01T00:00:00.500Z",
        "level": "WARNING",
        "logger": "qmq.server",
        "message": "slave fenced term=7 offset=81920",
        "fields": {"term": "7", "offset": "81920"},
    }


def test_equal_lines_are_written_once_a_minute():
    bounded = Bounded()
    assert bounded.filter(record("away")) and not bounded.filter(record("away"))
    assert bounded.filter(record("away", at=1000 + REPEAT_S))


def test_lines_of_a_cause_are_bounded_and_counted():
    """284 sockets wrote 7,700 lines, each with its own port."""
    bounded = Bounded()
    written = [bounded.filter(record("bad request peer=%d", number)) for number in range(7_700)]
    assert sum(written) == LINES_MAX
    assert bounded.filter(record("another cause", lineno=2)), "others are written all the same"
    later = record("bad request peer=%d", 1, at=1000 + REPEAT_S)
    assert bounded.filter(later)
    assert later.getMessage() == f"bad request peer=1 left_out={7_700 - LINES_MAX}"


def test_library_loggers_are_bounded_in_applications(caplog):
    """10,000 failing handlers wrote 10,000 tracebacks."""
    log = bounded("qmq.client.example")
    for number in range(10 * LINES_MAX):
        log.warning("handler failed sequence=%d", number)
    assert len(caplog.records) == LINES_MAX


def test_value_without_text_does_not_break_logging():
    class Bad:
        def __repr__(self):
            raise RuntimeError("no text")

    assert Bounded().filter(record("handler failed message=%r", Bad())), "handlers say what they cannot write"


@pytest.mark.parametrize("folder", ["client", "remoting", "outbox", "blocking", "redrive", "idempotence"])
def test_library_modules_have_bounded_loggers(folder):
    unbounded = [
        path.name for path in (Path(qmq.__file__).parent / folder).rglob("*.py") if "getLogger" in path.read_text()
    ]
    assert unbounded == []


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TimeoutError(), "no answer in time"),
        (ConnectionResetError(), "ConnectionResetError"),
        (NotServed("x"), "x"),
        (Exception(2003, "Can't connect to MySQL server"), "Can't connect to MySQL server (2003)"),
        (urllib.error.URLError(TimeoutError()), "no answer in time"),
        (urllib.error.URLError(ConnectionRefusedError(111, "Connection refused")), "[Errno 111] Connection refused"),
    ],
)
def test_error_without_text_has_a_cause(error, text):
    assert cause_of(error) == text


def test_signal_toggles_full_logging():
    program = (
        "import logging, os, signal; from qmq.logs import configure; configure('WARNING')\n"
        "for said in ('first', 'second', 'third'):\n"
        "    logging.getLogger('qmq.x').debug(said)\n"
        "    said == 'third' or os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [line.split(" ", 3)[3] for line in ran.stderr.splitlines()] == [
        "log level is now DEBUG, by SIGUSR1",
        "second",
        "log level is now WARNING, by SIGUSR1",
    ]


def test_records_of_a_handler_name_its_message():
    message = SimpleNamespace(id="m1", subject="a", group="g", times=2)
    token = HANDLED.set([message])
    try:
        inside, own = record("saved order=%s", "42"), record("handler failed id=%s", "m1")
        assert MessageFields().filter(inside) and MessageFields().filter(own)
    finally:
        HANDLED.reset(token)
    fields = {"message_id": "m1", "subject": "a", "group": "g", "attempt": "2"}
    assert json.loads(Json().format(inside))["fields"] == {"order": "42"} | fields
    assert Text().format(inside).endswith("saved order=42 message_id=m1 subject=a group=g attempt=2")
    assert json.loads(Json().format(own))["fields"] == {"id": "m1"}, "it names the message itself"
    outside = record("idle")
    assert MessageFields().filter(outside) and outside.message_id == "" and Text().format(outside).endswith(" idle")


# Errors of abandoned tasks.


async def fail_when(may_fail):
    """Fail after the event, or at the cancellation."""
    try:
        await may_fail.wait()
    finally:
        raise ValueError("planted")


async def abandon(may_fail):
    """Wait shielded for a task, and be cancelled; then let the task fail."""
    task = asyncio.create_task(fail_when(may_fail))
    waiting = asyncio.create_task(shielded(task))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled() and not task.done()
    may_fail.set()
    await asyncio.wait([task])


async def test_error_of_an_abandoned_task_is_not_logged():
    unseen = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    may_fail = asyncio.Event()
    await abandon(may_fail)
    gc.collect()
    assert unseen == []
    with pytest.raises(ValueError, match="planted"):
        await shielded(asyncio.create_task(fail_when(may_fail)))


def test_failure_at_a_cancellation_is_not_logged(caplog):
    """Ctrl-C in a blocking call cancels its work, which may fail at that moment."""
    with lock:
        loop = background()
    begun = threading.Event()

    async def work():
        begun.set()
        await fail_when(asyncio.Event())

    future = loop.submit(work())
    assert begun.wait(10) and future.cancel()
    loop.run(asyncio.sleep(0))
    del future  # it has the task
    gc.collect()
    loop.run(asyncio.sleep(0))
    assert "never retrieved" not in caplog.text
