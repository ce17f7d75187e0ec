"""Shell. The nightly job: prove that both copies of each broker group are equal, or name what is not.

    python -m audit.jobs.consistency --group g1 --master /data/b1 --slave 10.0.0.2:20883 --token-file token
    python -m audit.jobs.consistency --all-groups --metaserver http://127.0.0.1:8080 --token-file token

Exit status: 0 proven equal, 1 findings, 2 could not read (or nothing was read).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from audit.brokers import find_groups
from audit.copies import CannotRead, place_options
from audit.group import Group, Result, audit_group
from audit.report import VERDICTS, as_json, as_markdown, status_of
from audit.source import PIECE_BYTES
from audit.spark import start_spark
from qmq.access import add_token_options, find_token
from qmq.errors import QmqError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m audit.jobs.consistency", description=__doc__.splitlines()[0])
    parser.add_argument("--group", action="append", default=[], help="broker group; repeat with --master and --slave")
    parser.add_argument("--master", action="append", default=[], help="data directory, or ip:control_port of a broker")
    parser.add_argument("--slave", action="append", default=[], help="the same of the other copy")
    parser.add_argument("--all-groups", action="store_true", help="ask the metaserver which groups there are")
    parser.add_argument("--metaserver", default="", help="its URL, for --all-groups")
    add_token_options(parser)
    parser.add_argument("--journal", type=Path, help="NDJSON of acknowledged {subject, group, sequence, id}")
    parser.add_argument("--spark-master", default="local[*]", help="local[*], spark://host:port, yarn, …")
    parser.add_argument("--piece-bytes", type=int, default=PIECE_BYTES, help="bytes of log per task")
    parser.add_argument("--report", type=Path, help="write the report for people here (Markdown)")
    parser.add_argument("--result", type=Path, help="write the machine-readable result here (JSON)")
    parser.add_argument("--parquet", type=Path, help="write counts and findings into this directory")
    return parser


def groups_of(options: argparse.Namespace) -> list[Group]:
    """Return the groups that the command line names; raises CannotRead."""
    if options.all_groups:
        if not options.metaserver:
            raise CannotRead("--all-groups needs --metaserver")
        return find_groups(options.metaserver, options.token)
    if not options.group or not len(options.group) == len(options.master) == len(options.slave):
        raise CannotRead("give --group, --master and --slave, each once per group, or --all-groups")
    return [
        Group(name, {"master": place_options(master, options.token), "slave": place_options(slave, options.token)})
        for name, master, slave in zip(options.group, options.master, options.slave)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        # What last night's audit wrote says nothing about tonight, however this one ends.
        _write(options, [], 0.0)
        options.token = find_token(options.token, token_file=options.token_file)
        began = time.monotonic()
        results = _audit(options, groups_of(options))
        report = _write(options, results, time.monotonic() - began)
    except Exception as error:
        # Python itself would end with status 1, which says that there are findings.
        print(error if isinstance(error, QmqError | OSError) else traceback.format_exc(), file=sys.stderr)
        return 2
    print(report)
    for result in results:
        if result.unreadable:
            print(f"{result.group}: {result.unreadable}", file=sys.stderr)
    status = status_of(results)
    print(f"\n{VERDICTS[status]}: exit status {status}")
    return status


def _audit(options: argparse.Namespace, groups: list[Group]) -> list[Result]:
    spark = start_spark(options.spark_master, "qmq audit")
    try:
        return [
            audit_group(
                spark, group, journal=options.journal, piece_bytes=options.piece_bytes, parquet=options.parquet
            )
            for group in groups
        ]
    finally:
        spark.stop()


def _write(options: argparse.Namespace, results: list[Result], seconds: float) -> str:
    """Write the files that were asked for; return the report."""
    report = as_markdown(results, seconds)
    if options.report:
        options.report.write_text(report + "\n")
    if options.result:
        options.result.write_text(json.dumps(as_json(results, seconds), indent=1) + "\n")
    return report


if __name__ == "__main__":
    sys.exit(main())
