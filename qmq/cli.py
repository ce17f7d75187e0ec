"""Shell. The command `qmq`: starts each process, and runs each operators' command, by its name.

    qmq broker --config b1.toml       same as `python -m qmq.broker --config b1.toml`
    qmq ListBrokers                   same as `tools.sh ListBrokers`

Only the module of the typed name is imported. An application with only the client installed has this command, too; for
other names it prints the packages to install.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from qmq.version import VERSION

CANNOT_START = 2
"""Exit status of a program that is not installed. As for invalid settings, because a restart does not help."""


@dataclass(frozen=True, slots=True)
class Program:
    """Program that is started by a name after `qmq`."""

    module: str
    """Module that is run as `python -m` runs it."""
    extra: str
    """Extra of the distribution for `pip install 'qmq[…]'`; empty if the client includes it."""
    help: str
    words: tuple[str, ...] = ()
    """Shell completions after the name: options, with `=` before a value, and actions."""
    starts: tuple[str, ...] = ()
    """Packages of its child processes: a missing one is reported before they start."""


_CONFIG = ("--config=",)
_TOKEN = ("--token-file=", "--token=")
_LOGS = ("--log-level=", "--log-format=")

SECTIONS: Mapping[str, Mapping[str, Program]] = {
    "try it": {
        "dev": Program(
            "qmq.deploy.local",
            "server",
            "run a cluster on this machine, until Ctrl-C",
            ("run", "stop", "--dir=", "--port=", "--with-prometheus"),
            starts=("uvicorn",),
        ),
        "hello": Program("qmq.deploy.hello", "", "send a message and consume it", ("--metaserver=", *_TOKEN)),
        "demo": Program(
            "qmq.deploy.demo",
            "server,audit,demo",
            "send real rows, lose a master, swap roles, prove it",
            ("--input=", "--dir="),
            starts=("uvicorn", "pyspark"),
        ),
        "chaos": Program(
            "qmq.deploy.chaos.main",
            "server",
            "inject faults into a cluster, and check its promises",
            ("--minutes=", "--seed=", "--faults=", "--settings=", "--dir=", "--list"),
            starts=("uvicorn",),
        ),
    },
    "applications": {
        "worker": Program(
            "qmq.worker",
            "",
            "handle messages of an application in processes of their own",
            ("--processes=", "--concurrency=", "--reload", "--http=", "--stop-timeout=", "--kill-after=", *_LOGS),
        ),
        "asyncapi": Program(
            "qmq.asyncapi", "pydantic", "print the AsyncAPI document of an application", ("--html", "--title=")
        ),
    },
    "processes": {
        "metaserver": Program("qmq.metaserver", "server", "run a metaserver", _CONFIG),
        "broker": Program("qmq.broker", "server", "run a broker", _CONFIG),
        "delayserver": Program("qmq.delayserver", "server", "run a delay server", _CONFIG),
        "watchdog": Program("qmq.watchdog", "server", "run a watchdog", _CONFIG),
        "gateway": Program("qmq.gateway", "gateway", "run an HTTP gateway for applications without a client", _CONFIG),
    },
    "proof": {
        "audit": Program(
            "qmq.audit.jobs.consistency",
            "audit",
            "prove that both copies of each group are equal",
            ("--all-groups", "--metaserver=", "--group=", "--master=", "--slave=", *_TOKEN),
        ),
        "query": Program("qmq.audit.jobs.query", "audit", "query the logs in SQL", ("--source=", "--sql=", *_TOKEN)),
    },
    "on the machines": {
        "inspect": Program(
            "qmq.tools.inspect",
            "",
            "show the content of a stopped broker's data directory",
            ("--json", "--verify", "--subjects=", "--above="),
        ),
        "give-up": Program(
            "qmq.tools.give_up",
            "",
            "make a damaged log whole without frames that no copy has any more",
            ("--accept-loss",),
        ),
        "nightly": Program(
            "qmq.deploy.nightly", "", "run a nightly job and report its end to Prometheus", ("--name=", "--textfile=")
        ),
        "try-backup": Program(
            "qmq.metaserver.storage.try_backup", "server", "restore a backup into an empty database, to see"
        ),
        "prometheus": Program(
            "qmq.deploy.prometheus.config",
            "",
            "write Prometheus' targets and the alert rules",
            ("--metaserver=", *_TOKEN, "--scrape-token-file=", "--watchdog=", "--node-exporter=", "--out="),
        ),
        "dashboards": Program("qmq.deploy.dashboards", "", "write Grafana's pages", ("--out=",)),
        "nginx": Program(
            "qmq.deploy.nginx",
            "",
            "print nginx's configuration for several metaservers",
            ("--listen=", "--metaserver="),
        ),
    },
}
"""Programs by section and name, in the order of `qmq --help`."""

PROGRAMS: Mapping[str, Program] = {name: program for section in SECTIONS.values() for name, program in section.items()}
OPERATORS = Program("qmq.tools", "tools", "operators' commands, as in tools.sh")


def main(arguments: Sequence[str] | None = None) -> int | str | None:
    """Run the named program with the remaining arguments; return its exit status."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-V", "--version"):
        print(f"qmq {VERSION}")
        return 0
    if name in ("-h", "--help"):
        print(_help())
        return 0
    program = PROGRAMS.get(name, OPERATORS)
    sys.argv = ["qmq", *rest] if name in PROGRAMS else ["qmq", name, *rest]
    try:
        for package in filter(lambda package: find_spec(package) is None, program.starts):
            raise ModuleNotFoundError(name=package)
        runpy.run_module(program.module, run_name="__main__")
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package == "qmq" or not program.extra:
            raise
        print(f"qmq {name}: {package} is not installed; type: pip install 'qmq[{program.extra}]'", file=sys.stderr)
        return CANNOT_START
    except SystemExit as ended:
        return ended.code
    return 0


def _help() -> str:
    lines = ["usage: qmq NAME [OPTION…]", "", f"qmq {VERSION}. `qmq NAME --help` shows its options.", ""]
    for section, programs in SECTIONS.items():
        lines += [f"{section}:", *(f"  {name:26}{program.help}" for name, program in programs.items()), ""]
    operators: str = import_module("qmq.tools.usage").list_of_commands()
    return "\n".join([*lines, operators])
