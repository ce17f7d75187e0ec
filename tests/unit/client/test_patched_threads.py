"""Shell. Clients in a process with threads and sockets of gevent or eventlet: they hung past every timeout."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import qmq
import qmq.blocking
from qmq.blocking.background import Background
from qmq.errors import InvalidRequest

OPTIONS = {"metaserver": "http://127.0.0.1:9", "app": "test", "token": "t"}
CLIENTS = [qmq.Producer, qmq.Consumer, qmq.blocking.Producer, qmq.blocking.Consumer]


def patch(monkeypatch, library: str, *names: str) -> None:
    """Load a stand-in for the module in which the library reports replaced modules."""
    module, function = {
        "gevent": ("gevent.monkey", "is_module_patched"),
        "eventlet": ("eventlet.patcher", "is_monkey_patched"),
    }[library]
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{function: names.__contains__}))


@pytest.mark.parametrize("library, name", [("gevent", "threading"), ("gevent", "socket"), ("eventlet", "thread")])
@pytest.mark.parametrize("client", CLIENTS, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_client_is_rejected_beside_green_threads(monkeypatch, client, library, name):
    patch(monkeypatch, library, name)
    with pytest.raises(InvalidRequest, match=f"^{library} has replaced .* use threads"):
        client(**OPTIONS)


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
async def test_client_made_before_the_patch_is_rejected(monkeypatch, library):
    producer, consumer = qmq.Producer(**OPTIONS), qmq.Consumer(**OPTIONS)
    consumer.listen("a", group="g")(print)
    puller = consumer.pull("b", group="g")
    patch(monkeypatch, library, "select")
    for opens in (producer.__aenter__, puller.__aenter__, consumer.run):
        with pytest.raises(InvalidRequest, match=library):
            await opens()
    with pytest.raises(InvalidRequest, match=library):
        Background()


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_loaded_library_that_replaced_nothing_is_accepted(monkeypatch, library):
    patch(monkeypatch, library, "time", "subprocess")
    for client in CLIENTS:
        client(**OPTIONS)
