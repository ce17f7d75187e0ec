"""Shell. A broker that answers "stored" before any disk has the message."""

from __future__ import annotations

import sys

from qmq.broker.main import main
from qmq.replication.ack_gate import AckGate

if __name__ == "__main__":
    AckGate.stored = lambda self, end, answer: answer(None)
    sys.exit(main())
