"""Shell. A broker with outgoing connections through a test's cables; CABLES maps ports to ports of cables."""

from __future__ import annotations

import json
import os
import sys

from qmq.broker.main import main
from qmq.server import meta_link, service
from qmq.types import Endpoint

CABLES = "QMQ_TEST_CABLES"


def through(endpoint):
    port = json.loads(os.environ[CABLES]).get(str(endpoint.port), endpoint.port)
    return Endpoint(endpoint.host, port)


def connecting(connect):
    return lambda endpoint, **words: connect(through(endpoint), **words)


def finding(find):
    return lambda url: str(through(Endpoint.parse(find(url))))


if __name__ == "__main__":
    service.connect, meta_link.find_metaserver = connecting(service.connect), finding(meta_link.find_metaserver)
    sys.exit(main())
