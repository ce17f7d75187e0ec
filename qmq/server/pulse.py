"""Shell. Heartbeats on the link between two copies: a firewall that forgets the connection costs seconds, not minutes.

Each end sends its time every second (BEAT). An end that receives nothing for `SILENT_S` closes the connection, and the
slave opens a new one. A peer that never sent a BEAT is of an older version, and is not expected to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from qmq.errors import InvalidRequest
from qmq.remoting import commands
from qmq.remoting.commands import Beat, Command
from qmq.remoting.connection import Connection
from qmq.remoting.packet import Packet
from qmq.replication.node import Node
from qmq.ticking import SECOND_S, until_next_second

log = logging.getLogger(__name__)

BEAT_S = SECOND_S
SILENT_S = 5.0
"""Longer than a loop is blocked while it moves a copy aside or compares a segment. Shorter than the time in which
`slave_lag_ms_max` ends a link.
"""


class Pulse:
    """Heartbeats of one end of a connection. Made on the loop after its login; ends with the connection."""

    def __init__(self, node: Node[Any], connection: Connection, now_ms: Callable[[], int]) -> None:
        self._node = node
        self._connection = connection
        self._now_ms = now_ms
        self._loop = asyncio.get_running_loop()
        self._beats_too = False
        self._known_bytes, self._silent_s, self._looked_s = 0, 0.0, self._loop.time()
        self._beat()

    def received(self, packet: Packet) -> bool:
        """Handle a packet if it is a heartbeat; return whether it was."""
        if packet.code != Command.BEAT:
            return False
        try:
            beat = commands.decode_beat(packet.body)
        except InvalidRequest as error:
            self._connection.close(str(error))
        else:
            self._beats_too = True
            self._node.record_copy_clock(self._connection, beat.wall_ms, is_disk_full=beat.is_disk_full)
        return True

    def _beat(self) -> None:
        if not self._connection.is_open:
            return
        if self._is_silent():
            log.warning(
                "sync link silent peer=%s seconds=%.1f: connecting again", self._connection.peer, self._silent_s
            )
            self._connection.abort(f"no byte arrived for {SILENT_S:.0f} s")
            return
        beat = Beat(self._now_ms(), self._node.is_disk_full)
        self._connection.push(Command.BEAT, commands.encode_beat(beat))
        self._loop.call_later(until_next_second(self._loop.time(), BEAT_S), self._beat)

    def _is_silent(self) -> bool:
        now_s, received_bytes = self._loop.time(), self._connection.received_bytes
        # After a stall of this loop unread bytes may wait, so the stall does not count as silence of the other end.
        self._silent_s += min(now_s - self._looked_s, 2 * BEAT_S)
        if received_bytes != self._known_bytes or not self._beats_too:
            self._silent_s = 0.0
        self._known_bytes = received_bytes
        self._looked_s = now_s
        return self._silent_s >= SILENT_S - BEAT_S / 10  # timers are not exact: five beats may be a little less
