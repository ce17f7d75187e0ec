"""Shell. Brokers' control ports, served by fakes, for audits of running brokers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from qmq.proto import qmq_pb2_grpc


@contextmanager
def serving(broker: qmq_pb2_grpc.BrokerServicer, *hosts: str) -> Iterator[list[str]]:
    """Serve a fake broker at an address on each of these hosts; by default at one."""
    server = grpc.server(ThreadPoolExecutor(8))
    qmq_pb2_grpc.add_BrokerServicer_to_server(broker, server)
    names = hosts or ("127.0.0.1",)
    ports = [server.add_insecure_port(f"{name}:0") for name in names]
    server.start()
    try:
        yield [f"{name}:{port}" for name, port in zip(names, ports)]
    finally:
        server.stop(None).wait()
