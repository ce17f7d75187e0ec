"""Shell. The nightly job: prove that all copies of each broker group are equal, or list the differences.

    qmq audit --group g1 --master /data/b1 --slave 10.0.0.2:20883 --token-file token
    qmq audit --all-groups --metaserver http://127.0.0.1:8080 --token-file token

Exit status: 0 proven equal, 1 findings, 2 could not read (or nothing was read).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession

from qmq.access import add_token_options, find_token
from qmq.audit.copies import CannotRead, place_options
from qmq.audit.data_source import is_submitted, start_spark
from qmq.audit.group import audit_groups
from qmq.audit.history import SHARE
from qmq.audit.page import page, page_json
from qmq.audit.places import GroupStatus, find_changes, find_group_status, find_places
from qmq.audit.report import VERDICTS, as_json, as_markdown, status_of
from qmq.audit.results import Group, Result
from qmq.audit.selection import PIECE_BYTES
from qmq.audit.wave import Options
from qmq.errors import QmqError
from qmq.ledger import Entry, Ledger, LedgerDamaged, write_gauges

UNFINISHED = "The run that wrote this page has not ended, or it failed. The page shows earlier runs."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qmq audit", description="Prove that all copies of each broker group are equal, or list the differences."
    )
    parser.add_argument("--group", action="append", default=[], help="broker group; repeat with --master and --slave")
    parser.add_argument(
        "--master", action="append", default=[], help="data directory, or HOST:CONTROL_PORT of a broker"
    )
    parser.add_argument(
        "--slave", action="append", default=[], help="the same of the slave; of several slaves, with commas"
    )
    parser.add_argument("--all-groups", action="store_true", help="audit all groups that the metaserver lists")
    parser.add_argument("--metaserver", default="", help="URL of a metaserver, for --all-groups")
    add_token_options(parser)
    parser.add_argument("--journal", type=Path, help="journal of acknowledged messages: a file of NDJSON, or a folder")
    parser.add_argument(
        "--ledger", type=Path, help="directory of the verified ranges: read new bytes, and some of the old ones"
    )
    parser.add_argument(
        "--share", type=_positive, default=SHARE, help="with --ledger: read one part in so many of the old bytes"
    )
    parser.add_argument("--metrics", type=Path, help="with --ledger: write gauges here, for node_exporter (*.prom)")
    parser.add_argument(
        "--page", type=Path, help="with --ledger: write the morning page here (HTML), and beside it the same as JSON"
    )
    parser.add_argument(
        "--spark-master",
        help="spark://host:port, yarn, …; by default spark-submit's, or local[*] for logs of more than 1 GiB",
    )
    parser.add_argument("--piece-bytes", type=_positive, default=PIECE_BYTES, help="bytes of log per task")
    parser.add_argument("--report", type=Path, help="write the report for people here (Markdown)")
    parser.add_argument("--result", type=Path, help="write the machine-readable result here (JSON)")
    parser.add_argument("--parquet", type=Path, help="write counts and findings into this directory")
    return parser


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def groups_of(options: argparse.Namespace) -> list[Group]:
    """Return the groups on the command line; raise CannotRead."""
    if options.all_groups:
        if not options.metaserver:
            raise CannotRead("--all-groups needs --metaserver")
        found = find_places(options.metaserver, options.token)
        standing = find_group_status(options.metaserver, options.token)
        return [Group(name, places, *standing.get(name, GroupStatus())) for name, places in found.items()]
    if not options.group or not len(options.group) == len(options.master) == len(options.slave):
        raise CannotRead("give --group, --master and --slave, each once per group, or --all-groups")
    return [
        Group(name, {"master": place_options(master, options.token)} | _slaves(slaves, options.token))
        for name, master, slaves in zip(options.group, options.master, options.slave)
    ]


def _slaves(places: str, token: str) -> dict[str, dict[str, str]]:
    """Return the slaves' places by name: slave, slave2, …"""
    found = enumerate(places.split(","), 1)
    return {"slave" if number == 1 else f"slave{number}": place_options(place, token) for number, place in found}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        # Overwrite last night's result first: it must not pass for tonight's if this run fails.
        _write(options, [], 0.0)
        _check_files(options)
        if options.page:
            _begin_page(options)
        options.token = find_token(options.token, token_file=options.token_file)
        began = time.monotonic()
        results = _audit(options, groups_of(options))
        report = _write(options, results, time.monotonic() - began)
        now_ms = int(time.time() * 1000)
        if options.metrics:
            write_gauges(options.metrics, Ledger(options.ledger), now_ms=now_ms)
        if options.page:
            unread = (f"{result.group}: {result.unreadable}" for result in results if result.unreadable)
            _write_page(options, now_ms, "; ".join(unread))  # a failed line is missing in the ledger
    except Exception as error:
        # Python would exit with status 1, which means findings.
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
    """Audit the groups: small logs in this process; others, or with a given Spark master, on Spark."""
    ledger = Ledger(options.ledger) if options.ledger else None
    trail = partial(find_changes, options.metaserver, options.token) if options.metaserver else None
    asked = Options(options.journal, options.piece_bytes, options.parquet, ledger, options.share, trail=trail)
    with ExitStack() as stack:

        def start() -> SparkSession:
            spark = start_spark(options.spark_master, "qmq audit")
            stack.callback(spark.stop)
            return spark

        return audit_groups(start() if options.spark_master or is_submitted() else start, groups, asked)


def _check_files(options: argparse.Namespace) -> None:
    """Raise CannotRead if files cannot be written as requested."""
    if (options.metrics or options.page) and not options.ledger:
        raise CannotRead("--metrics and --page need --ledger")
    written = [options.report, options.result, options.metrics]
    written += [options.page, options.page.with_suffix(".json")] if options.page else []
    paths = [path.resolve() for path in written if path]
    for path in paths:
        if paths.count(path) > 1:
            raise CannotRead(f"{path} would be written twice (--page also writes a .json): give each file another name")


def _write(options: argparse.Namespace, results: list[Result], seconds: float) -> str:
    """Write the requested files; return the report."""
    report = as_markdown(results, seconds)
    if options.report:
        options.report.write_text(report + "\n")
    if options.result:
        options.result.write_text(json.dumps(as_json(results, seconds), indent=1) + "\n")
    return report


def _begin_page(options: argparse.Namespace) -> None:
    """Write the page as it stays if this run never ends."""
    try:
        _write_page(options, int(time.time() * 1000), UNFINISHED)
    except LedgerDamaged:  # the other groups are audited all the same
        _write_page_of(options, {}, int(time.time() * 1000), UNFINISHED)


def _write_page(options: argparse.Namespace, now_ms: int, why: str = "") -> None:
    ledger = Ledger(options.ledger)
    _write_page_of(options, {name: ledger.entries(name) for name in ledger.groups()}, now_ms, why)


def _write_page_of(options: argparse.Namespace, groups: dict[str, list[Entry]], now_ms: int, why: str) -> None:
    options.page.write_text(page(groups, now_ms, why))
    options.page.with_suffix(".json").write_text(json.dumps(page_json(groups, now_ms, why)) + "\n")


if __name__ == "__main__":
    sys.exit(main())
