"""Shell. Prometheus' configuration for one installation: scrape targets and alert rules.

    qmq prometheus --metaserver 10.0.0.9:8080 --token-file viewer.token --out /etc/prometheus/qmq

Targets are the brokers, delay servers, metaservers and active watchdogs registered with the metaserver, and the named
gateways, each with the label `cluster`, the metaserver's setting. Run it again when one is added.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from qmq.access import add_token_options, find_token
from qmq.control_plane import first_answer, metaserver_urls
from qmq.deploy.control import manage
from qmq.deploy.plan import write_atomically
from qmq.errors import QmqError
from qmq.types import Endpoint

TEMPLATE = Path(__file__).with_name("prometheus.yml")
RULES = Path(__file__).with_name("qmq.rules.yml")
INTERVAL_S = 15
DEFAULT_CLUSTER = "qmq"
"""Name of an installation with an older metaserver, without the setting `cluster`."""

Target = dict[str, Any]


def find_targets(ask: Callable[..., Any], watchdogs: Iterable[str] = (), gateways: Iterable[str] = ()) -> list[Target]:
    """Return targets for Prometheus' file discovery.

    Args:
        ask: runs an action at the metaserver.
        watchdogs: addresses of standbys; the metaserver lists only active ones.
        gateways: addresses of gateways, which register at no metaserver.
    """
    brokers = [
        _target(
            "delayserver" if row["role"].startswith("DELAY") else "broker",
            str(Endpoint(row["ip"], row["metricsPort"])),
            hostname=row["hostname"],
        )
        for row in ask("ListBrokers", details="true")
        if row["metricsPort"]
    ]
    rows = ask("ListMetaservers")
    metaservers = [_target("metaserver", row["http"]) for row in rows]
    active = [row["address"] for row in ask("ListWatchdogs") if row["address"]]
    others = [_target("watchdog", address) for address in sorted({*active, *watchdogs})]
    others += [_target("gateway", address) for address in sorted(set(gateways))]
    targets = [*metaservers, *brokers, *others]
    cluster = next((row["cluster"] for row in rows if row.get("cluster")), DEFAULT_CLUSTER)
    for target in targets:
        target["labels"]["cluster"] = cluster
    return targets


def _target(kind: str, address: str, **labels: str) -> Target:
    return {"targets": [str(Endpoint.parse(address))], "labels": {"kind": kind, **labels}}


def write_config(
    directory: Path,
    targets: list[Target],
    *,
    token_file: Path,
    interval_s: int = INTERVAL_S,
    node_exporters: Iterable[str] = (),
) -> Path:
    """Write prometheus.yml, the targets and the rules; return the path of the first."""
    directory.mkdir(parents=True, exist_ok=True)
    cluster = next((target["labels"]["cluster"] for target in targets), DEFAULT_CLUSTER)
    values: Mapping[str, str] = {
        "cluster": json.dumps(cluster),
        "nightly": json.dumps(f"{cluster}-nightly"),
        "interval": f"{interval_s}s",
        "token_file": json.dumps(str(token_file.resolve())),
        "node_exporters": json.dumps([str(Endpoint.parse(address)) for address in node_exporters]),
    }
    text = TEMPLATE.read_text()
    for name, value in values.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    files = {
        "qmq.targets.json": json.dumps(targets, indent=1) + "\n",
        RULES.name: RULES.read_text(),
        TEMPLATE.name: text,
    }
    for name, content in files.items():
        write_atomically(directory / name, content, mode=0o644)
    return directory / TEMPLATE.name


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="qmq prometheus", description="Write Prometheus' targets and the alert rules."
    )
    default = os.environ.get("QMQ_METASERVER") or None
    parser.add_argument("--metaserver", default=default, required=default is None, help="default: QMQ_METASERVER")
    add_token_options(parser)
    parser.add_argument("--scrape-token-file", type=Path, help="file that Prometheus reads; default: --token-file")
    parser.add_argument("--watchdog", action="append", default=[], help="address:port of a standby; repeat it")
    parser.add_argument("--gateway", action="append", default=[], help="address:port of a gateway; repeat it")
    parser.add_argument("--node-exporter", action="append", default=[], help="where nightly jobs run; repeat it")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    options = parser.parse_args(arguments)
    try:
        scrape_token = options.scrape_token_file or options.token_file or os.environ.get("QMQ_TOKEN_FILE")
        if not scrape_token:
            raise QmqError("Prometheus reads its token from a file: name it with --scrape-token-file")
        token = find_token(options.token, token_file=options.token_file)
        urls = metaserver_urls(options.metaserver)
        targets = first_answer(
            urls, lambda url: find_targets(partial(manage, url, token), options.watchdog, options.gateway)
        )
        path = write_config(options.out, targets, token_file=Path(scrape_token), node_exporters=options.node_exporter)
    except (QmqError, OSError, ValueError) as error:
        print(f"qmq prometheus: {error}", file=sys.stderr)
        return 1
    print(f"{path}: {len(targets)} targets")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
