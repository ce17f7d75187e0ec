"""Shell. Starts one broker: builds its parts and joins them."""

from __future__ import annotations

import sys

from qmq.broker.answers import Counters
from qmq.broker.control import BeginRequests, Control
from qmq.broker.master import BrokerMaster
from qmq.broker.metrics import open_http
from qmq.broker.retention import Retention
from qmq.broker.settings import BrokerSettings
from qmq.log import MessageLog, RealDisk
from qmq.remoting.commands import Command
from qmq.replication.identity import IdentityFile
from qmq.server.control import Samples
from qmq.server.meta_link import MetaLink
from qmq.server.repair import keep_repairing
from qmq.server.running import Tasks, run
from qmq.server.scrub import Scrub
from qmq.server.service import Service

CLIENT_COMMANDS = frozenset(
    {
        Command.PRODUCE,
        Command.SUBSCRIBE,
        Command.PULL,
        Command.ACK,
        Command.NACK,
        Command.BEGIN,
        Command.HEARTBEAT,
        Command.UNSUBSCRIBE,
    }
)


def main() -> int:
    """Run until SIGTERM or SIGINT; return the exit status: 0 stopped, 2 wrong settings, 1 could not start."""
    return run("broker", BrokerSettings, "QMQ_BROKER", "One broker: master or slave of its group.", _build)


def _build(settings: BrokerSettings, message_log: MessageLog, disk: RealDisk, identity: IdentityFile) -> Tasks:
    counters, retention, begin_requests = Counters(), Retention(settings), BeginRequests()
    service = Service(
        message_log=message_log,
        disk=disk,
        identity=identity,
        settings=settings,
        commands=CLIENT_COMMANDS,
        promote=lambda promotion: BrokerMaster(promotion, settings, counters, begin_requests.ask),
        keeper=retention,
    )
    samples = Samples(lambda: (counters.produced_messages, counters.pulled_messages, counters.acked_messages))
    meta_link = MetaLink(service, settings)
    tasks = [
        service.run(),
        meta_link.run(),
        begin_requests.run(service, meta_link, settings),
        Control(service, settings, samples).serve(),
        keep_repairing(service, settings),
        Scrub(service, settings).run(),
        samples.run(),
    ]
    return [*tasks, open_http(service, counters, settings, retention).run()]


if __name__ == "__main__":
    sys.exit(main())
