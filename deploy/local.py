"""Shell. `make run` and `make stop`: a whole cluster on this machine, in the foreground, until Ctrl-C.

`RUN_DIR`, or `--dir`, names the directory; by default `.run`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from deploy.cluster import AlreadyRunning, Cluster, lock_directory, recorded_pids
from deploy.processes import end_leftovers, is_ours
from qmq.errors import QmqError

__all__ = ["Cluster"]

STOP_S = 45.0
"""A runner that was asked to stop needs at most two bounds of `deploy.processes`, and some more."""


class Stopped(BaseException):
    """Ctrl-C or SIGTERM arrived: whatever the runner is doing, stop the cluster."""


def _stopped(number: int, frame: FrameType | None) -> None:
    # Once is enough: a second Ctrl-C must not interrupt the stopping, which ends by itself.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise Stopped


def say(line: str) -> None:
    print(line, flush=True)


def run(run_dir: Path) -> int:
    """Run a cluster until a signal ends it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stopped)
    say(f"starting a metaserver, two broker groups and a group of delay servers; data and logs are in {run_dir}/")
    cluster = Cluster(run_dir, delay_groups=("d1",), say=say)
    try:
        with cluster:
            say(_welcome(cluster))
            while True:
                signal.pause()
    except Stopped:
        say("stopped")
        return 0


def _welcome(cluster: Cluster) -> str:
    brokers, delay = (
        ", ".join(f"{one.hostname} :{one.serve_port}" for one in cluster.plan.brokers if one.is_delay_server is kind)
        for kind in (False, True)
    )
    return (
        f"metaserver  {cluster.metaserver}\nbrokers     {brokers}\ndelay       {delay}\ntoken       {cluster.token}\n"
        f"addresses   {cluster.run_dir / 'cluster.json'}\nCtrl-C or `make stop` ends it; what dies is started again"
    )


def stop(run_dir: Path) -> int:
    """Stop what runs in `run_dir`, and what a killed runner left there."""
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
            # It may not have written its pid yet; 0 would be our own process group.
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
    parser = argparse.ArgumentParser(prog="python -m deploy.local", description="Run a cluster on this machine.")
    parser.add_argument("action", choices=["run", "stop"])
    parser.add_argument("--dir", type=Path, default=Path(os.environ.get("RUN_DIR", ".run")), help="default: .run")
    options = parser.parse_args(arguments)
    try:
        return run(options.dir) if options.action == "run" else stop(options.dir)
    except QmqError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
