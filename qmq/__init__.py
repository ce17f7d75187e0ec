"""Send and receive messages: see `Producer` and `Consumer`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qmq.client.batching import Outcome, Receipt, Receipts
    from qmq.client.consumer import Consumer, Puller
    from qmq.client.holding import ReceivedMessage
    from qmq.client.producer import Producer
    from qmq.errors import (
        AccessError,
        ClientClosed,
        InvalidMessage,
        InvalidName,
        InvalidRequest,
        QmqError,
        QueueFull,
        SubscriptionReplaced,
    )
    from qmq.message import Message

_PUBLIC = {
    "Consumer": "client.consumer",
    "Message": "message",
    "Outcome": "client.batching",
    "Producer": "client.producer",
    "Puller": "client.consumer",
    "Receipt": "client.batching",
    "ReceivedMessage": "client.holding",
    "Receipts": "client.batching",
} | dict.fromkeys(
    (
        "AccessError",
        "ClientClosed",
        "InvalidMessage",
        "InvalidName",
        "InvalidRequest",
        "QmqError",
        "QueueFull",
        "SubscriptionReplaced",
    ),
    "errors",
)
"""Imported when first used: a broker or Spark worker that wants `qmq.log` must not load the client and gRPC."""

__all__ = [
    "AccessError",
    "ClientClosed",
    "Consumer",
    "InvalidMessage",
    "InvalidName",
    "InvalidRequest",
    "Message",
    "Outcome",
    "Producer",
    "Puller",
    "QmqError",
    "QueueFull",
    "Receipt",
    "ReceivedMessage",
    "Receipts",
    "SubscriptionReplaced",
]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"qmq has no name {name!r}")
    value = globals()[name] = getattr(import_module(f"qmq.{_PUBLIC[name]}"), name)
    return value  # kept: asking again for `qmq.Message` cost a producer a microsecond per message
