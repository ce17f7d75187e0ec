"""Shell. Starts one delay server: builds its parts and joins them."""

from __future__ import annotations

import asyncio
import sys

from qmq.client.numbered_sender import NumberedSender
from qmq.delayserver.control import DelayControl
from qmq.delayserver.decisions import Counters
from qmq.delayserver.master import DelayMaster
from qmq.delayserver.metrics import open_http
from qmq.delayserver.schedule import Schedule, discard
from qmq.delayserver.settings import DelaySettings
from qmq.delayserver.upkeep import DelayRetention, ScheduleFiler
from qmq.log import MessageLog, RealDisk
from qmq.log.delay_frames import SCHEDULE_FOLDER
from qmq.remoting.commands import Command
from qmq.replication.identity import IdentityFile
from qmq.replication.master import Promotion
from qmq.server.control import Samples
from qmq.server.meta_link import MetaLink
from qmq.server.repair import keep_repairing
from qmq.server.running import Tasks, run
from qmq.server.scrub import Scrub
from qmq.server.service import Service
from qmq.types import GroupKind

BEAT_S = 0.01
"""Interval of clock checks while messages are due: half of it adds to their lateness."""
CLIENT_COMMANDS = frozenset({Command.PRODUCE, Command.CANCEL, Command.RESCHEDULE, Command.RECUR})


def main() -> int:
    """Run until SIGTERM or SIGINT; return the exit status: 0 stopped, 2 wrong settings, 1 could not start."""
    return run("delayserver", DelaySettings, "QMQ_DELAY", "One delay server: master or slave of its group.", _build)


def _build(settings: DelaySettings, message_log: MessageLog, disk: RealDisk, identity: IdentityFile) -> Tasks:
    counters = Counters()
    senders = NumberedSender(metaserver=settings.metaserver, token=settings.token, app=settings.hostname)
    shelf = RealDisk(settings.data / SCHEDULE_FOLDER, cached_bytes=None)
    segment_ms, keep_ms = settings.segment_minutes * 60_000, int(settings.sent_hours * 3_600_000)

    def make(log_start: int) -> Schedule:
        return Schedule(shelf, segment_ms=segment_ms, log_start=log_start, keep_ms=keep_ms)

    def promote(promotion: Promotion) -> DelayMaster:
        return DelayMaster(promotion, settings, counters, filing, senders)

    service = Service(
        message_log=message_log,
        disk=disk,
        identity=identity,
        settings=settings,
        commands=CLIENT_COMMANDS,
        promote=promote,
        keeper=DelayRetention(lambda: filing, settings),
        shelves=[shelf],
    )
    filing = ScheduleFiler(
        message_log, service, make=make, discard=lambda: discard(shelf), found_damage=service.node.found_damage
    )
    samples = Samples(lambda: (counters.produced_messages, counters.sent_messages, counters.sent_messages))
    tasks = [
        service.run(),
        MetaLink(service, settings, kind=GroupKind.DELAY).run(),
        DelayControl(service, settings, filing, samples).serve(),
        keep_repairing(service, settings),
        _send(senders),
        Scrub(service, settings).run(),
        _beat(service, filing),
        samples.run(),
    ]
    return [*tasks, open_http(service, counters, filing, settings, lambda: senders.refusals).run()]


async def _send(senders: NumberedSender) -> None:
    """Keep connections to the broker groups open."""
    async with senders:
        await asyncio.Event().wait()


async def _beat(service: Service[DelayMaster], filing: ScheduleFiler) -> None:
    """Start passes of the master, or file the log of a slave, and flush the schedule, at short intervals."""

    def beat() -> None:
        master = service.node.master
        if master is not None:
            master.beat()
        else:
            filing.go_on(filing.known_end)
        filing.keep(service.now_ms())

    def quiet_ms() -> int:
        master = service.node.master
        return filing.quiet_ms() if master is None else master.due_in_ms()

    try:
        await service.repeat(beat, BEAT_S, quiet_ms)
    finally:
        filing.stop(service.now_ms())


if __name__ == "__main__":
    sys.exit(main())
