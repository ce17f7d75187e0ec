"""Shell. `qmq dev` and `qmq dev stop`: a whole cluster on this machine, in the foreground, until Ctrl-C.

`--dir`, or the variable `RUN_DIR`, names the directory; by default `.run`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from qmq.deploy.cluster import AlreadyRunning, Cluster, lock_directory, recorded_pids
from qmq.deploy.plan import BROKER_PORT, HTTP_PORT, is_free
from qmq.deploy.processes import end_leftovers, is_ours
from qmq.errors import NotServed, QmqError, cause_of

__all__ = ["Cluster"]

SEGMENT_BYTES = 16 << 20
"""Size of a new log's file: six copies are 96 MiB instead of 6 GiB."""
STOP_S = 45.0
"""Time for a runner to stop: two bounds of `deploy.processes`, and some more."""


LOOK_S = 0.5
"""Maximum delay of a signal, see `_until_stopped`."""


class Stopped(BaseException):
    """Ctrl-C or SIGTERM arrived: stop the cluster at once."""

    arrived = False


def _stopped(number: int, frame: FrameType | None) -> None:
    # Only once: a second Ctrl-C must not interrupt the stop, which ends by itself.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    Stopped.arrived = True
    raise Stopped


def _until_stopped() -> NoReturn:
    """Wait for a signal. `signal.pause` would miss one right before it, or one during a finaliser, which ends there."""
    while not Stopped.arrived:
        time.sleep(LOOK_S)
    raise Stopped


def say(line: str) -> None:
    print(line, flush=True)


def run(run_dir: Path, port: int | None, broker_port: int | None, *, prometheus: bool) -> int:
    """Run a cluster until a signal ends it; `port` is its metaserver's, `broker_port` the first of its brokers'."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stopped)
    check_ports(run_dir, port, broker_port)
    say(f"starting a metaserver, two broker groups, delay servers and a watchdog; data and logs are in {run_dir}/")
    cluster = Cluster(
        run_dir,
        delay_groups=("d1",),
        watchdog=True,
        prometheus=prometheus,
        broker={"segment_bytes": SEGMENT_BYTES},
        delay_server={"segment_bytes": SEGMENT_BYTES},
        metaserver={"failover": True},
        http_port=port or HTTP_PORT,
        broker_port=broker_port or BROKER_PORT,
        say=say,
    )
    try:
        with cluster:
            say(_welcome(cluster))
            _until_stopped()
    except Stopped:
        say("stopped")
        return 0


def check_ports(run_dir: Path, port: int | None, broker_port: int | None) -> None:
    """Raise NotServed if the cluster in `run_dir` cannot use these ports; None: any."""
    plan = run_dir / "plan.json"
    kept = json.loads(plan.read_text()) if plan.exists() else None
    for option, asked, of_plan in (
        ("--port", port, kept and kept["http_port"]),
        ("--broker-port", broker_port, kept and kept["brokers"][0]["serve_port"]),
    ):
        if asked is None:
            continue
        if kept and of_plan != asked:
            text = f"the cluster in {run_dir} has port {of_plan} already: leave out {option}, or name another --dir"
            raise NotServed(text)
        if not is_free(asked):
            raise NotServed(f"port {asked} is in use by another program; choose another {option}")


def _welcome(cluster: Cluster) -> str:
    brokers, delay = (
        ", ".join(
            f"{broker.hostname} :{broker.serve_port}"
            for broker in cluster.plan.brokers
            if broker.is_delay_server is kind
        )
        for kind in (False, True)
    )
    return (
        f"metaserver  {cluster.metaserver}\n"
        f"console     {cluster.metaserver}/console, with a token of `qmq AddToken --name=me --role=operator`\n"
        f"brokers     {brokers}\ndelay       {delay}\n"
        + "".join(f"{name:12}{url}\n" for name, url in cluster.others.items())
        + f"addresses   {cluster.run_dir / 'cluster.json'}\n\n"
        f"for commands and programs in another terminal:\n"
        f"  export QMQ_METASERVER={cluster.metaserver}\n  export QMQ_TOKEN={cluster.token}\n  export QMQ_APP=shop\n\n"
        f"Ctrl-C or `qmq dev stop` ends the cluster; a process that ends by itself is started again"
    )


def stop(run_dir: Path) -> int:
    """Stop the cluster in `run_dir`, and processes left by a killed runner."""
    run_dir = run_dir.resolve()
    if not run_dir.exists():
        say("no cluster runs here")
        return 0
    asked = None
    deadline = time.monotonic() + STOP_S
    while True:
        try:
            lock = lock_directory(run_dir)
            break
        except AlreadyRunning as running:
            # The pid may not be written yet; 0 would be our own process group.
            if asked is None and running.owner:
                asked = running.owner
                os.kill(asked, signal.SIGTERM)
            if asked and time.monotonic() > deadline:
                say(f"process {asked} does not end; ending its processes one by one")
                os.kill(asked, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.05)
    with lock:
        left = end_leftovers(recorded_pids(run_dir), run_dir)
    if left:
        say(f"ended processes {', '.join(map(str, left))}, which a killed runner had left")
    say("stopped" if asked or left else "no cluster runs here")
    return 1 if any(is_ours(pid, run_dir) for pid in left) else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="qmq dev", description="Run a cluster on this machine.")
    parser.add_argument("action", choices=["run", "stop"], nargs="?", default="run", help="default: run")
    parser.add_argument("--dir", type=Path, default=Path(os.environ.get("RUN_DIR", ".run")), help="default: .run")
    port_help = f"the metaserver's HTTP port; default: {HTTP_PORT}, or the next free one"
    parser.add_argument("--port", type=_port, help=port_help)
    broker_help = f"first port of the brokers, which take four each; default: {BROKER_PORT}, or the next free one"
    parser.add_argument("--broker-port", type=_port, help=broker_help)
    parser.add_argument("--with-prometheus", action="store_true", help="run a Prometheus, too, with all alert rules")
    options = parser.parse_args(arguments)
    try:
        return (
            run(options.dir, options.port, options.broker_port, prometheus=options.with_prometheus)
            if options.action == "run"
            else stop(options.dir)
        )
    except (QmqError, OSError) as error:
        print(f"qmq dev: {cause_of(error)}", file=sys.stderr)
        return 1


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65_536:
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
