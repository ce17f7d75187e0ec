"""Filters that handle redelivered messages once: they remember the messages handled by a consumer group."""

from __future__ import annotations

from qmq.idempotence.checker import Idempotence
from qmq.idempotence.keys import Claim, KeyStore, MemoryKeys

__all__ = ["Claim", "Idempotence", "KeyStore", "MemoryKeys"]
