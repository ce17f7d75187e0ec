"""Shell. The metaserver's methods for brokers, without gRPC."""

from __future__ import annotations

import asyncio

from qmq.metaserver.access import Access
from qmq.metaserver.model import BrokerKey
from qmq.metaserver.rpc.access import Visits
from qmq.metaserver.rpc.brokers import BrokerRpc
from tests.unit.metaserver.actions_world import ADMIN


def service_of(world, monkeypatch, name):
    """Return the service, and the registration of the broker of this name."""
    monkeypatch.setattr("qmq.metaserver.rpc.brokers.caller", lambda: ADMIN)
    service = BrokerRpc()
    service._registry, service._ask = world.registry, lambda question: asyncio.sleep(0)
    service.visits = Visits(Access(()))
    service._metrics = world.metrics
    service._logged = set()
    broker = world.registry.directory.find(BrokerKey(name, 20881))
    registered = {"hostname": broker.hostname, "ip": broker.ip, "incarnation": broker.incarnation}
    return service, registered | {"serve_port": 20881, "sync_port": 20882, "control_port": 20883, "metrics_port": 20884}


class Aborted(Exception):
    """Raised by `abort`."""


class Aborting:
    """Context of a call."""

    def invocation_metadata(self):
        return ()

    async def abort(self, code, text):
        self.code = code
        raise Aborted(text)
