"""Shell. A message that kills each process handling it becomes one dead letter; its neighbours are handled."""

from __future__ import annotations

import subprocess
import sys
from itertools import count
from pathlib import Path

from qmq.codec import decode_envelope, split_batch
from qmq.subjects import dead_letter_subject
from tests.integration.cluster_world import Wire, pull, shared_cluster, subscribe, until
from tests.integration.poisoned_process import LIMIT

ROOT = Path(__file__).parents[2]
COUNT = 1_000
LOOKS = count()


cluster = shared_cluster(lease_ms=5_000)


def test_poison_message_becomes_a_single_dead_letter(cluster, tmp_path):
    cluster.send_all("poisoned", COUNT, name="p")
    poison, ended = "p-500", 0
    command = [sys.executable, "-m", "tests.integration.poisoned_process", cluster.metaserver, cluster.token]
    out = tmp_path / "handled"
    with out.open("w") as stdout:
        while True:
            process = subprocess.Popen([*command, "poisoned", poison], cwd=ROOT, stdout=stdout)
            try:
                until(lambda p=process: p.poll() is not None or is_done(cluster, out), "it ends, or all is done")
            finally:
                process.kill()
            if process.wait() != 9:
                break
            ended += 1
    assert dead(cluster) == [poison]
    assert LIMIT <= ended <= LIMIT + 1, "the first crash accuses nobody"
    assert set(handled(out)) == {f"p-{number}" for number in range(COUNT)} - {poison}


def is_done(cluster, out: Path) -> bool:
    return len(set(handled(out))) == COUNT - 1 and bool(dead(cluster))


def handled(out: Path) -> list[str]:
    return [line.split()[0] for line in out.read_text().splitlines()]


def dead(cluster) -> list[str]:
    """Return the ids of all dead letters, read by a new group each time."""
    with Wire(cluster.broker("g1", "master").serve_port, token=cluster.token) as wire:
        subscription = subscribe(wire, dead_letter_subject("poisoned", "g"), group=f"look{next(LOOKS)}")
        pieces = pull(wire, subscription)
        return [decode_envelope(bytes(data)).id for piece in pieces for data in split_batch(piece.body, piece.count)]
