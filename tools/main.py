"""Shell. Reads the command line, asks the metaserver, prints the answer.

Exit status: 0 done, 1 refused, 2 wrong usage, 3 metaserver not reached, 4 outcome unknown (look before repeating).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from tools import (
    add_broker,
    list_broker_groups,
    list_brokers,
    mark_readonly,
    replace_broker,
    replica_status,
    swap_roles,
    unmark_readonly,
)
from tools.call import Address, CallFailed, post
from tools.command import Command

DONE, REFUSED, USAGE, UNREACHABLE, UNKNOWN = range(5)
COMMANDS: tuple[Command, ...] = (
    add_broker.COMMAND,
    replace_broker.COMMAND,
    list_brokers.COMMAND,
    list_broker_groups.COMMAND,
    mark_readonly.COMMAND,
    unmark_readonly.COMMAND,
    swap_roles.COMMAND,
    replica_status.COMMAND,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status. Wrong usage exits with 2 from within, as argparse does."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    command: Command = options.command
    token = options.token if options.token is not None else os.environ.get("QMQ_TOKEN", "")
    if command.changes and not token:
        parser.error(f"{command.name} needs a token: --token=… or the variable QMQ_TOKEN")
    words = {"action": command.action} | {option.name: getattr(options, option.name) for option in command.options}
    try:
        answer = post(options.metaserver, token, words, timeout_s=command.timeout_s)
    except CallFailed as error:
        unknown = command.changes and error.sent
        complain(f"{error}{'. It may have been done or not: look before you repeat it' if unknown else ''}")
        return UNKNOWN if unknown else UNREACHABLE
    return report(command, answer, as_json=options.json)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools.sh",
        description="Operators' commands of qmq.",
        epilog="exit status: 0 done, 1 refused, 2 wrong usage, 3 metaserver not reached, 4 outcome unknown",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=command.help, allow_abbrev=False)
        sub.set_defaults(command=command)
        sub.add_argument("--metaserver", required=True, type=_address, help="host:port or URL of the metaserver")
        sub.add_argument("--token", help="API token; default: the variable QMQ_TOKEN")
        sub.add_argument("--json", action="store_true", help="print the metaserver's answer as it is")
        for option in command.options:
            required = option.default is None
            kind = _port if option.is_port else str
            sub.add_argument(f"--{option.name}", required=required, default=option.default, help=option.help, type=kind)
    return parser


def report(command: Command, answer: Any, *, as_json: bool) -> int:
    """Print an answer; return the exit status it stands for."""
    enveloped = isinstance(answer, dict) and "status" in answer
    status = answer["status"] if enveloped else 0
    if as_json:
        print(json.dumps(answer, ensure_ascii=False))
    if status != 0:
        complain(str(answer.get("message")))
        return UNKNOWN if status == -2 else REFUSED
    if not as_json:
        print(command.render(answer["data"] if enveloped else answer))
    return DONE


def complain(text: str) -> None:
    print(f"tools.sh: {text}", file=sys.stderr)


def _port(text: str) -> str:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return text


def _address(text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
