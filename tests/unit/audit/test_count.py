"""Shell. Messages are counted by a property without Spark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qmq.audit.jobs import count
from qmq.codec import encode_message
from qmq.message import Message
from tests.unit.audit.logs import BEGIN_MS, LogWriter
from tests.unit.audit.test_walk import flip


def write(data: Path, name: str) -> LogWriter:
    log = LogWriter.begun(data)
    for subject, values in (("a,b", ["UA", "AA", "UA", None]), ("other", ["UA"])):
        messages = [Message(subject, {} if value is None else {name: value}, id="m") for value in values]
        log.messages(subject, [encode_message(message, BEGIN_MS) for message in messages])
    log.close()
    return log


@pytest.mark.parametrize("name", ["carrier", "it's", "back\\slash"])
def test_messages_are_counted_by_property(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    for group in ("g1", "g2"):
        write(tmp_path / group, name)
    arguments = ["--source", str(tmp_path / "g1"), "--source", str(tmp_path / "g2"), "--subject", "a,b"]
    assert count.main([*arguments, "--property", name, "--json"]) == 0
    rows = [(row["value"], row["messages"]) for row in json.loads(capsys.readouterr().out)]
    assert rows == [("UA", 4), ("AA", 2), (None, 2)]


def test_damaged_log_is_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write(tmp_path, "carrier")
    flip(tmp_path, log.frames[1].end - 5)
    assert count.main(["--source", str(tmp_path), "--subject", "a,b", "--property", "carrier"]) == 2
    assert str(log.frames[1].offset) in capsys.readouterr().err
