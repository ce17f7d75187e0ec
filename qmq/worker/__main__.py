"""Shell. The command `qmq worker`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from qmq.worker.command import add_options, run
from qmq.worker.plan import Exit


def main(arguments: Sequence[str] | None = None) -> Exit:
    parser = argparse.ArgumentParser(
        prog="qmq worker",
        description="Handle messages in processes of their own, until SIGTERM or Ctrl-C. SIGHUP reloads.",
        epilog="exit status: 0 ended on request, 1 failed, 2 wrong call or import error, 77 token rejected",
    )
    add_options(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
