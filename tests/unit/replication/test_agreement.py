"""Core. Where two copies agree, and what a slave has to do (design, section 4.3)."""

from __future__ import annotations

import pytest

from qmq.errors import InvalidRequest
from qmq.remoting.commands import encode_json
from qmq.replication.agreement import Hello
from qmq.types import Epoch

PLAIN = {"group": "g1", "incarnation": "b", "term": 1, "boot": 1, "epochs": [[1, 1, 0, 0]], "start": 0, "end": 40}


@pytest.mark.parametrize(
    "wrong",
    [
        {"chain": -1},
        {"chain": 1 << 64},
        {"end": -8},
        {"term": -1},
        {"epochs": [["1", 1, 0, 0]]},
        {"epochs": [[1, 1, 0, -1]]},
        {"epochs": [[1, 1, 0]]},
        {"epochs": [None]},
        {"epochs": 7},
        {"start": "0"},
    ],
    ids=str,
)
def test_hello_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(InvalidRequest):
        Hello.decode(encode_json(**(PLAIN | {"chain": 5} | wrong)))


def test_hello_arrives_as_it_was_sent():
    hello = Hello.decode(encode_json(**PLAIN, chain=(1 << 64) - 1))
    assert (hello.known, hello.chain) == (Epoch(1, 1), (1 << 64) - 1)
    assert Hello.decode(hello.encode()) == hello
