"""Core. Terms of a SUBSCRIBE."""

from __future__ import annotations

import json

import pytest

from qmq.broker.subscriptions import read_terms
from qmq.codec import TAGS_MAX
from qmq.errors import InvalidName, InvalidRequest
from qmq.remoting.commands import Command, encode_subscribe
from qmq.remoting.packet import Packet
from qmq.subjects import dead_letter_subject

WORDS = [f"tag{number}" for number in range(TAGS_MAX)]


def read(**changed):
    fields = json.loads(encode_subscribe(subject="s", group="g", consumer="c"))
    body = memoryview(json.dumps(fields | changed).encode())
    return read_terms(Packet(Command.SUBSCRIBE, 1, 0, Command.SUBSCRIBE, body))


@pytest.mark.parametrize(
    "changed",
    [
        {"start": "tomorrow"},
        {"tag_mode": "some"},
        {"tags": [*WORDS, "more"]},
        *({"tags": ["pay", none]} for none in ("", 1, None, "\ud800", "a\udfff")),
        *({name: -1} for name in ("deliveries_max", "held_end", "since_ms")),
        *({name: "\ud800"} for name in ("subject", "group", "consumer")),
    ],
    ids=ascii,
)
def test_invalid_terms_are_refused(changed):
    with pytest.raises(InvalidRequest):
        read(**changed)


@pytest.mark.parametrize("name", ["a/b", "n" * 101])
@pytest.mark.parametrize("field", ["subject", "group", "consumer"])
def test_invalid_names_are_refused(field, name):
    with pytest.raises(InvalidName):
        read(**{field: name})


@pytest.mark.parametrize(
    "changed",
    [
        *({"start": start} for start in ("latest", "earliest", "since")),
        *({"tag_mode": mode} for mode in ("any", "all")),
        *({"tags": tags} for tags in ([], WORDS, ["\ud7ff\ue000"])),
        {"deliveries_max": 0, "held_end": 1, "since_ms": 2},
        {"begins": True, "exclusive_ms": 5},
    ],
    ids=str,
)
def test_terms_are_decoded(changed):
    assert changed.items() <= read(**changed).items()


@pytest.mark.parametrize("said", [{}, {"begins": 1, "exclusive_ms": "5"}], ids=["nothing", "nonsense"])
def test_older_client_has_defaults(said):
    assert {"begins": False, "exclusive_ms": 0}.items() <= read(**said).items()


def test_dead_letter_has_no_delivery_limit():
    assert read(deliveries_max=3)["deliveries_max"] == 3
    assert read(deliveries_max=3, subject=dead_letter_subject("s", "g"))["deliveries_max"] == 0
