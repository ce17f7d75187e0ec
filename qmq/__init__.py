"""Send and receive messages: see `Producer` and `Consumer`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from qmq import grpc_forks as _grpc_forks  # noqa: F401  # first: it decides how all later imports load gRPC
from qmq.version import VERSION as __version__

if TYPE_CHECKING:
    from qmq import payloads as payloads
    from qmq.client.batch import Outcome, Receipt, Receipts
    from qmq.client.consumer import Consumer
    from qmq.client.delay import DelayOutcome
    from qmq.client.health import Health, HealthState
    from qmq.client.journal import Journal
    from qmq.client.listener import Listener
    from qmq.client.membership import MasterChanged
    from qmq.client.producer import Producer
    from qmq.client.puller import Puller
    from qmq.client.received import ReceivedMessage
    from qmq.client.router import Router
    from qmq.errors import (
        AccessError,
        ClientClosed,
        DeadLetter,
        InvalidMessage,
        InvalidName,
        InvalidPayload,
        InvalidRequest,
        MissingExtra,
        NoRoute,
        NotServed,
        OutcomeUnknown,
        QmqError,
        QueueFull,
        RetryLater,
        SubscriptionReplaced,
        UnreadablePayload,
    )
    from qmq.message import Message
    from qmq.remoting.commands import RecurringSchedule

_PUBLIC = {
    "Consumer": "client.consumer",
    "DelayOutcome": "client.delay",
    "Health": "client.health",
    "HealthState": "client.health",
    "Journal": "client.journal",
    "Listener": "client.listener",
    "MasterChanged": "client.membership",
    "Message": "message",
    "Outcome": "client.batch",
    "Producer": "client.producer",
    "Puller": "client.puller",
    "Receipt": "client.batch",
    "ReceivedMessage": "client.received",
    "Receipts": "client.batch",
    "RecurringSchedule": "remoting.commands",
    "Router": "client.router",
} | dict.fromkeys(
    (
        "AccessError",
        "ClientClosed",
        "DeadLetter",
        "InvalidMessage",
        "InvalidName",
        "InvalidPayload",
        "InvalidRequest",
        "MissingExtra",
        "NoRoute",
        "NotServed",
        "OutcomeUnknown",
        "QmqError",
        "QueueFull",
        "RetryLater",
        "SubscriptionReplaced",
        "UnreadablePayload",
    ),
    "errors",
)
"""Imported on first use: brokers and Spark workers import `qmq.log` without loading the client and gRPC."""

__all__ = [
    "AccessError",
    "ClientClosed",
    "Consumer",
    "DeadLetter",
    "DelayOutcome",
    "Health",
    "HealthState",
    "InvalidMessage",
    "InvalidName",
    "InvalidPayload",
    "InvalidRequest",
    "Journal",
    "Listener",
    "MasterChanged",
    "Message",
    "MissingExtra",
    "NoRoute",
    "NotServed",
    "Outcome",
    "OutcomeUnknown",
    "Producer",
    "Puller",
    "QmqError",
    "QueueFull",
    "Receipt",
    "ReceivedMessage",
    "Receipts",
    "RecurringSchedule",
    "RetryLater",
    "Router",
    "SubscriptionReplaced",
    "UnreadablePayload",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "payloads":
        return import_module("qmq.payloads")
    if name not in _PUBLIC:
        raise AttributeError(f"qmq has no name {name!r}")
    value = globals()[name] = getattr(import_module(f"qmq.{_PUBLIC[name]}"), name)
    return value  # kept: another import of `qmq.Message` would cost a producer a microsecond per message
