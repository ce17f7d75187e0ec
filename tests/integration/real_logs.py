"""Shell. Directories that real servers wrote: a broker group and a delay group, for audits to read and to forge."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import NamedTuple

import qmq
from qmq import DelayOutcome, Message
from qmq.audit.places import Change
from qmq.deploy.cluster import Cluster
from qmq.log.delay_frames import decode_settled
from qmq.log.frame import FrameKind
from tests.unit.audit.forged import read_frames

SUBJECT, DELAYED = "order.changed", ("order.unpaid", "order.unseen", "order.lost")
SENT, LATE = 40, 5
OVERDUE = timedelta(hours=2)
"""Delayed messages are this late, so that an unsent one is a finding."""
Places = dict[str, dict[str, Path]]
"""{broker group: {copy: data directory}}"""


class Lived(NamedTuple):
    """Directories of a cluster, and its operators' commands about consumer groups."""

    places: Places
    trail: list[Change]


async def live(cluster: Cluster) -> None:
    """Send messages at once and delayed, cancel one and reschedule one, and consume all but the last ten."""
    client = {"metaserver": cluster.metaserver, "token": cluster.token, "app": "lived"}
    due = datetime.now(UTC) - OVERDUE
    async with qmq.Producer(**client) as producer:
        for turn in range(SENT // 5):
            await producer.send_many([Message(SUBJECT, {"n": 5 * turn + n}) for n in range(5)])
        far = await producer.send_many(
            [Message(DELAYED[0], {"n": f"far{n}"}) for n in range(3)], delay=timedelta(days=30)
        )
        assert await producer.cancel(far[0]) is DelayOutcome.CANCELLED
        assert await producer.reschedule(far[1], at=due) is DelayOutcome.RESCHEDULED
        for subject in DELAYED:
            await producer.send_many([Message(subject, {"n": str(n)}) for n in range(LATE)], at=due)
        await _consume(client, SUBJECT, SENT - 10)
        cluster.manage("ResetOffset", subject=SUBJECT, group="g", to="latest")
        for subject in DELAYED:
            await _consume(client, subject, LATE + (subject == DELAYED[0]))


async def _consume(client: dict[str, str], subject: str, count: int) -> None:
    async with qmq.Consumer(**client).pull(subject, group="g", start="earliest") as puller:
        got = 0
        while got < count:
            for message in await puller.pull(min(5, count - got), timeout=30):
                await message.ack()
                got += 1


def is_settled(data: Path) -> bool:
    """Return whether the outcome of each planned batch is in a delay server's log."""
    frames = [(frame, body) for _, frame, body in read_frames(data)]
    planned = {(frame.producer, frame.batch) for frame, _ in frames if frame.kind == FrameKind.DISPATCH}
    settled = [decode_settled(body, frame.count) for frame, body in frames if frame.kind == FrameKind.SETTLED]
    return planned == {row[:2] for rows in settled for row in rows}


def directories(cluster: Cluster) -> Places:
    """Return the data directories of each group's copies; the master first."""
    roles = ("master", "slave")
    groups = {plan.group for plan in cluster.plan.brokers}
    return {group: {role: cluster.data(cluster.broker(group, role)) for role in roles} for group in sorted(groups)}


def copied(places: Places, folder: Path) -> Places:
    """Copy directories, so that a test may change them."""
    found = {group: {copy: folder / group / copy for copy in copies} for group, copies in places.items()}
    for group, copies in places.items():
        for copy, path in copies.items():
            copytree(path, found[group][copy], ignore=ignore_patterns("*.lock", "lock"))
    return found
