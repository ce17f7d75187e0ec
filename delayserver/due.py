"""Core. When a message is due, as it stands in its encoding; and who may be delayed for how long."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from qmq.codec import DUE_AT, FLAG_DELAYED, Buffer
from qmq.server.batch_check import check_messages

_DUE = struct.Struct(">q")
DAY_MS = 86_400_000


def dues_of(data: Buffer, begins: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the due time of each message that begins at `data[begins[i]]`."""
    text = np.frombuffer(data, np.uint8)
    places = begins[:, None] + np.arange(DUE_AT, DUE_AT + 8)
    return np.ascontiguousarray(text[places]).view(">i8").ravel().astype(np.int64)


def with_due(message: bytes, due_ms: int) -> bytes:
    """Return the same message, due at another time."""
    return message[:DUE_AT] + _DUE.pack(due_ms) + message[DUE_AT + 8 :]


def check_delayed(
    batch: Buffer, count: int, *, message_bytes_max: int, now_ms: int, longest_ms: int
) -> list[tuple[int, str]]:
    """Check a batch as a broker does, and that each message says when it is due, at most `longest_ms` from now.

    Raises:
        InvalidRequest: the end offsets make no sense, so nothing of the batch can be stored.
    """
    wrong = dict(check_messages(batch, count, message_bytes_max))
    data_at = 4 * (count + 1)
    data, bounds = memoryview(batch)[data_at:], np.frombuffer(batch, "<u4", count + 1).astype(np.int64)
    whole = np.flatnonzero(np.diff(bounds) >= DUE_AT + 8)
    begins = bounds[whole]
    dues = dues_of(data, begins)
    delayed = np.frombuffer(data, np.uint8)[begins] & FLAG_DELAYED != 0
    for at in np.nonzero(~delayed | (dues > now_ms + longest_ms) | (dues < 0))[0].tolist():
        wrong.setdefault(int(whole[at]), _fault(bool(delayed[at]), int(dues[at]), now_ms, longest_ms))
    return sorted(wrong.items())


def _fault(is_delayed: bool, due_ms: int, now_ms: int, longest_ms: int) -> str:
    if not is_delayed:
        return "it does not say when it is due; send it to a broker, or with a delay"
    if due_ms < 0:
        return f"due time {due_ms} is before 1970"
    most = f"{longest_ms / DAY_MS:g} (delay_days_max)"
    return f"due in {(due_ms - now_ms) / DAY_MS:.1f} days; this delay server takes at most {most}"
