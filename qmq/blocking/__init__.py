"""Send and receive messages in programs without an event loop: `Producer` and `Consumer`, see docs/blocking.md.

All other names are those of `qmq`: messages, receipts, errors.
"""

from qmq.blocking.consumer import Consumer, Puller
from qmq.blocking.producer import Producer

__all__ = ["Consumer", "Producer", "Puller"]
