"""Core. Limits of the largest message and of everything that carries one. Each follows from those above it.

    constant                MiB  carries
    BODY_BYTES_MAX           64  a body, before compression and after decompression
    MESSAGE_BYTES_MAX        65  an encoded message: a body, and 1 MiB of properties; highest `message_bytes_max`
    REQUEST_BYTES_MAX        66  a PRODUCE of one such message; highest `packet_bytes_max`
    FRAME_BYTES_MAX          72  such a batch in the log, or one message that the broker extended: a dead letter
    SYNC_PACKET_BYTES_MAX    73  a frame and its header, between two copies
    ANSWER_BYTES_MAX         80  a frame, and the 8 MiB of others that one pull or one call over gRPC returns with it

A broker's own settings are lower by default. Every reader accepts these, so an operator may raise `message_bytes_max`
without another release.

Versions before bodies of 64 MiB read frames of up to OLDER_FRAME_BYTES_MAX. A slave states its longest frame in its
hello (`qmq.replication.agreement`), and its master stores no longer one.
"""

from __future__ import annotations

MIB = 1 << 20

BODY_BYTES_MAX = 64 * MIB
MESSAGE_BYTES_MAX = BODY_BYTES_MAX + MIB
REQUEST_BYTES_MAX = MESSAGE_BYTES_MAX + MIB
FRAME_BYTES_MAX = 72 * MIB
"""Longest body of a frame. A larger length is damage, so the reader does not skip by it."""
SYNC_PACKET_BYTES_MAX = FRAME_BYTES_MAX + MIB
ANSWER_BYTES_MAX = FRAME_BYTES_MAX + 8 * MIB

OLDER_MESSAGE_BYTES_MAX = 32 * MIB
"""Highest `message_bytes_max` of earlier versions. Up to it, `packet_bytes_max` and `window_bytes` may be lower than a
message.
"""
OLDER_FRAME_BYTES_MAX = 64 * MIB - 1024
"""Longest body of a frame in earlier versions, whose packets between copies ended at 64 MiB, the frame's header
included.
"""
RECURRING_BYTES_MAX = 32 * MIB - 1024
"""Largest message of a recurring schedule: a carry frame holds it twice, and slaves of earlier versions must read that
frame.
"""

LARGE_BYTES_MIN = 1 << 18
"""Size above which copies and searches of a message are avoided: they take 1.1 and 1.3 ms per MiB."""
REQUEST_OVERHEAD_BYTES = 1024
"""Part of a request around one message: headers, subject, end offsets, label."""


def room_complaints(*, message_bytes_max: int, packet_bytes_max: int, window_bytes: int) -> list[str]:
    """Return the settings that are too low for a message of the largest size."""
    if message_bytes_max <= OLDER_MESSAGE_BYTES_MAX:
        return []
    least = message_bytes_max + REQUEST_OVERHEAD_BYTES
    given = {"packet_bytes_max": packet_bytes_max, "window_bytes": window_bytes}
    return [
        f"{name}: {value} bytes are too few for a message of message_bytes_max; set {name} = {least} or more"
        for name, value in given.items()
        if value < least
    ]
