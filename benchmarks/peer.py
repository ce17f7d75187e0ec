"""Shell. The same producer load against RabbitMQ, and how our figures compare to it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.machine import Clock
from benchmarks.rabbitmq import RabbitMq, is_installed
from benchmarks.speed import IN_FLIGHT, Sizes
from benchmarks.worker import Worker

QUEUE = "benchmark"
WINDOW = 1_000
"""Unconfirmed messages; RabbitMQ's rate hardly changes from 256 to 16,000."""


def missing() -> str:
    """What is not here that the comparison needs; empty if nothing is."""
    if not is_installed():
        return "RabbitMQ is not installed (Debian: apt-get install rabbitmq-server)"
    if importlib.util.find_spec("pamqp") is None:
        return "the Python package pamqp is not installed (it is in qmq's dev extra)"
    return ""


def measure(run_dir: Path, sizes: Sizes, say: Callable[[str], None]) -> list[Figure]:
    """Produce with publisher confirms into a mirrored queue of two nodes; one cluster for all measurements."""
    say("starting two RabbitMQ nodes")
    log = run_dir.parent / "rabbitmq-client.log"
    with RabbitMq(run_dir) as nodes, Worker("benchmarks.rabbitmq_client", log, str(nodes.port)) as client:
        loads = [("produce_1k", 1024, WINDOW), ("produce_100b", 100, WINDOW), ("send_each", 1024, IN_FLIGHT)]
        figures = [_rate(nodes, client, sizes, load, say) for load in loads]
        p50 = Figure("rabbitmq_send_one_p50_ms", more_is_better=False)
        for _ in range(sizes.repetitions):
            clock = Clock({})
            measured = client.run("send_one", subject=QUEUE, messages=sizes.peer_one, size=1024)
            p50.values.append(measured["p50_ms"])
            p50.elsewhere.append(clock.spent().elsewhere)
            say(f"{p50.name} {measured['p50_ms']:.3f}")
    return [*figures, p50]


def _rate(
    nodes: RabbitMq, client: Worker, sizes: Sizes, load: tuple[str, int, int], say: Callable[[str], None]
) -> Figure:
    name, size, in_flight = load
    figure = Figure(f"rabbitmq_{name}_per_s")
    pids = {"client": client.pid, **nodes.pids}
    cpu_s = dict.fromkeys(pids, 0.0)
    client.run("publish", subject=QUEUE, messages=sizes.peer // 5, size=size, in_flight=in_flight)
    for _ in range(sizes.repetitions):
        client.run("purge", subject=QUEUE)
        clock = Clock(pids)
        measured = client.run("publish", subject=QUEUE, messages=sizes.peer, size=size, in_flight=in_flight)
        spent = clock.spent()
        figure.values.append(measured["messages"] / measured["seconds"])
        figure.elsewhere.append(spent.elsewhere)
        cpu_s = {process: cpu_s[process] + seconds for process, seconds in spent.cpu_s.items()}
        say(f"{figure.name} {figure.values[-1]:,.0f}")
    messages = sizes.peer * sizes.repetitions
    figure.cpu_us = {process: seconds / messages * 1e6 for process, seconds in cpu_s.items()}
    return figure


def ratios(figures: Mapping[str, Figure]) -> dict[str, float]:
    """How many times faster we are; for times, how many times shorter ours is. Only what was measured on both sides."""
    found = {}
    for name, ours in figures.items():
        if (peer := figures.get(f"rabbitmq_{name}")) is not None:
            found[f"ratio_{name}"] = ours.value / peer.value if ours.more_is_better else peer.value / ours.value
    return found
