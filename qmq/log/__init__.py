"""The message log: frames, segments, the state folded from them, and recovery after a crash."""

from qmq.log.disk import Disk, RealDisk
from qmq.log.message_log import Commit, MessageLog

__all__ = ["Commit", "Disk", "MessageLog", "RealDisk"]
