"""Shell. Starts one broker: joins the parts of a broker around its log."""

from __future__ import annotations

import sys

from broker.control import Control
from broker.counters import Counters
from broker.master import BrokerMaster
from broker.metrics import serve_metrics
from broker.retention import Retention
from broker.settings import BrokerSettings
from qmq.log import MessageLog, RealDisk
from qmq.remoting.commands import Command
from qmq.replication.identity import IdentityFile
from qmq.server.meta_link import MetaLink
from qmq.server.repair import keep_whole
from qmq.server.running import Parts, run
from qmq.server.service import Service

CLIENT_COMMANDS = frozenset(
    {
        Command.PRODUCE, Command.SUBSCRIBE, Command.PULL, Command.ACK, Command.NACK, Command.HEARTBEAT,
        Command.UNSUBSCRIBE,
    }  # fmt: skip
)


def main() -> int:
    """Run until SIGTERM or SIGINT; returns the exit status: 0 told to stop, 2 wrong settings, 1 could not start."""
    return run("broker", BrokerSettings, "QMQ_BROKER", "One broker: master or slave of its group.", _build)


def _build(settings: BrokerSettings, message_log: MessageLog, disk: RealDisk, identity: IdentityFile) -> Parts:
    counters = Counters()
    service = Service(
        message_log=message_log, disk=disk, identity=identity, settings=settings, commands=CLIENT_COMMANDS,
        appoint=lambda appointment: BrokerMaster(appointment, settings, counters), keeper=Retention(settings),
    )  # fmt: skip
    tasks = [
        service.run(), MetaLink(service, settings).run(), Control(service, settings).serve(),
        keep_whole(service, settings),
    ]  # fmt: skip
    return Parts(tasks, serve_metrics(service, counters, settings))


if __name__ == "__main__":
    sys.exit(main())
