"""Messages that come again are handled once: filters that remember what a consumer group has handled."""

from __future__ import annotations

from qmq.idempotence.checker import Idempotence
from qmq.idempotence.keys import Claim, KeyStore, MemoryKeys

__all__ = ["Claim", "Idempotence", "KeyStore", "MemoryKeys"]
