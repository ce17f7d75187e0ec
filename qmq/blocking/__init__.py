"""Producer and consumer for programs without an event loop: see `Producer`, `Consumer` and docs/blocking.md.

All other names are those of `qmq`: messages, receipts, errors.
"""

from qmq.blocking.consumer import Consumer, Puller
from qmq.blocking.producer import Producer
from qmq.blocking.reply import Requester, reply

__all__ = ["Consumer", "Producer", "Puller", "Requester", "reply"]
