"""Shell. `qmq give-up DIR`: repair a stopped broker's log without the damaged part that no copy has any more.

Without `--accept-loss` it only shows that part. With it, the part goes to quarantine; nothing is deleted.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from qmq.errors import QmqError
from qmq.log import MessageLog, RealDisk
from qmq.log.disk import Disk, one_process
from qmq.log.overlay_disk import OverlayDisk
from qmq.log.repair import GivingUp, give_up, plan
from qmq.log.segments import segment_bases
from qmq.tools.call import Exit

SEGMENT_BYTES = 1 << 30
"""Unused: this command begins no segment."""


class _Refused(Exception):
    """Nothing was changed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the damaged part. Exit status: 0 if the log is whole, 1 if the part would go, 2 for wrong usage."""
    options = _parser().parse_args(arguments)
    logging.disable(logging.CRITICAL)
    try:
        if not segment_bases(OverlayDisk(options.directory)):
            raise _Refused("it has no log: this is no data directory of a broker or delay server")
        with one_process(options.directory, "process"):
            return _give_up(options.directory, accept_loss=options.accept_loss)
    except (QmqError, _Refused, OSError) as error:
        print(f"qmq give-up: {options.directory}: {error}", file=sys.stderr)
        return Exit.REFUSED
    finally:
        logging.disable(logging.NOTSET)


def _give_up(directory: Path, *, accept_loss: bool) -> int:
    disk: Disk = RealDisk(directory) if accept_loss else OverlayDisk(directory)
    log, steps = MessageLog(disk, segment_bytes=SEGMENT_BYTES, tail_bytes=0), 0
    while (loss := plan(log)) is not None:
        steps += 1
        print("\n".join(_shown(log, loss)))
        if not accept_loss:
            print("nothing was changed; if no copy of the group has this, add --accept-loss")
            return Exit.REFUSED
        give_up(log, loss)
    print(
        f"the log is whole from {log.start} to {log.end}" + ("; the removed bytes are in quarantine/" if steps else "")
    )
    return Exit.DONE


def _shown(log: MessageLog, loss: GivingUp) -> Iterator[str]:
    yield from (f"damaged: {problem}" for problem in loss.problems)
    goes = f"from {loss.cut} on" if loss.cut is not None else f"from {log.start} to {loss.start}"
    yield f"goes to quarantine: the log {goes}"
    for subject, (begin, end) in loss.subjects.items():
        yield f"  {subject}: sequences {begin} to {end - 1}"
    for (subject, group), count in loss.unconsumed.items():
        yield f"  not consumed by {group}: {count} messages of {subject}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qmq give-up",
        description="Repair a stopped broker's log without the damaged part, if no copy has that part any more.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the setting data of that broker")
    parser.add_argument("--accept-loss", action="store_true", help="do it; without this, only show the damaged part")
    return parser


if __name__ == "__main__":
    sys.exit(main())
