"""Core. Command line: parsing, help, and completion in bash and zsh, from the table of commands."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

from qmq.tools.call import Address
from qmq.tools.command import Command, Kind, Option
from qmq.tools.commands import COMMANDS, SECTIONS
from qmq.version import VERSION

TOOLS_SH = "tools.sh"
SHELLS = ("bash", "zsh")
EXIT_STATUS = """\
exit status:
  0  done
  1  refused, for the reason shown; nothing was changed
  2  wrong usage
  3  a metaserver, database or broker does not answer; nothing was changed
  4  outcome unknown; the command that shows it is named"""
METASERVER_VARIABLE = "QMQ_METASERVER"
_EXAMPLE_METASERVER = "--metaserver=127.0.0.1:8080"
_AWAY = re.compile(r"(\+?)(\d{1,6})([smhd])", re.ASCII)
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class WrongUsage(Exception):
    """The command line cannot be run. `usage` shows the right form."""

    def __init__(self, text: str, usage: str) -> None:
        super().__init__(text)
        self.usage = usage


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required") and "--metaserver" in message:
            message += f"; or, for all commands: export {METASERVER_VARIABLE}=HOST:PORT"
        raise WrongUsage(message, self.format_usage())


class _Once(argparse.Action):
    """Stores a value; a repeated option is an error."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        given = namespace.__dict__.setdefault("given", set())
        if self.dest in given:
            parser.error(f"{option} is given twice")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


class _Pairs(argparse.Action):
    """Collects `name=value` from each use of the option."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        name, equals, value = values.partition("=")
        pairs = json.loads(getattr(namespace, self.dest) or "{}")
        if not name or not equals:
            parser.error(f"{option}: {values!r} is not NAME=VALUE")
        if name in pairs:
            parser.error(f"{option}: {name} is given twice")
        setattr(namespace, self.dest, json.dumps(pairs | {name: value}))


def parse(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    now_ms: int,
    program: str = TOOLS_SH,
    others: Collection[str] = (),
) -> argparse.Namespace:
    """Parse a command line: `command` (a Command or None for `completion`), the common options, and `values` by option.

    Args:
        program: name of the program as typed.
        others: further commands of `program`, for the hint after a typing error.

    Raises:
        WrongUsage: it cannot be run.
    """
    parser = build_parser(environ, now_ms=now_ms, program=program)
    if not arguments:
        raise WrongUsage("which command?", parser.format_help())
    arguments = _command_first(arguments)
    if not arguments[0].startswith("-") and arguments[0] not in (*COMMANDS, "completion"):
        raise WrongUsage(_unknown_command(arguments[0], program, others), parser.format_usage())
    options = parser.parse_args(arguments)
    command: Command | None = options.command
    if command is not None:
        if empty := [o.name for o in command.options if o.default is None and getattr(options, _dest(o)) == ""]:
            raise WrongUsage(f"--{empty[0]} is empty", f"{program} {command.name} --help shows its values")
        typed = {option.name: getattr(options, _dest(option)) for option in command.options}
        # Defaults skip the parsers of typed text.
        options.values = {o.name: o.default if typed[o.name] is None else typed[o.name] for o in command.options}
    return options


def build_parser(environ: Mapping[str, str], *, now_ms: int, program: str = TOOLS_SH) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program,
        usage=f"{program} COMMAND --metaserver=HOST:PORT [OPTION…]",
        description=f"Operators' commands of qmq. {program} COMMAND --help describes one command.",
        epilog=f"{list_of_commands()}\n\n{EXIT_STATUS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="version", version=f"{program} of qmq {VERSION}")
    commands = parser.add_subparsers(
        metavar="COMMAND", prog=program, required=True, help=argparse.SUPPRESS, parser_class=_Parser
    )
    for command in COMMANDS.values():
        _add_command(commands, command, environ, now_ms, program)
    completion = commands.add_parser("completion", description="Print the completion of a shell.", allow_abbrev=False)
    completion.set_defaults(command=None)
    completion.add_argument("shell", choices=SHELLS, help=f"source <({program} completion bash)")
    return parser


def list_of_commands() -> str:
    """Return every command under its heading, with a short help."""
    lines = []
    for section, commands in SECTIONS.items():
        lines += ["", f"{section}:", *(f"  {command.name:26}{_brief(command.help)}" for command in commands)]
    return "\n".join([*lines, "", "shell:", f"  {'completion':26}print the completion of bash or zsh"]).lstrip("\n")


def _command_first(arguments: Sequence[str]) -> list[str]:
    """Move options before the command behind it: argparse would take them for its own."""
    at = next((at for at, word in enumerate(arguments) if word in COMMANDS), 0) if arguments[0].startswith("-") else 0
    return [arguments[at], *arguments[:at], *arguments[at + 1 :]]


def _unknown_command(typed: str, program: str, others: Collection[str]) -> str:
    by_folded = {name.lower(): name for name in (*COMMANDS, *others)}
    near = difflib.get_close_matches(typed[:100].lower(), by_folded, n=1)
    hint = f"did you mean {by_folded[near[0]]}?" if near else f"{program} --help lists them"
    return f"{typed[:100]!r} is no command; {hint}"


def _brief(text: str) -> str:
    """Return the part before the first punctuation."""
    return re.split(r"[,;:.] ", text)[0]


def _add_command(commands: Any, command: Command, environ: Mapping[str, str], now_ms: int, program: str) -> None:
    sub = commands.add_parser(
        command.name,
        description=f"{command.help[:1].upper()}{command.help[1:]}.",
        epilog=f"example:\n  {example(command, program)}\n\n{EXIT_STATUS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    sub.set_defaults(command=command)
    for option in command.options:
        _add_option(sub, option, now_ms)
    _add_common(sub, command, environ)


def example(command: Command, program: str = TOOLS_SH) -> str:
    """Return a whole command line as an example."""
    metaserver = "" if command.is_local else _EXAMPLE_METASERVER
    return " ".join(filter(None, (program, command.name, metaserver, command.example)))


def _add_common(sub: argparse.ArgumentParser, command: Command, environ: Mapping[str, str]) -> None:
    common = sub.add_argument_group("common options")
    default = environ.get(METASERVER_VARIABLE) or None
    common.add_argument(
        "--metaserver",
        action=_Once,
        type=_addresses,
        required=default is None and not command.is_local,
        metavar="HOST:PORT",
        default=default,
        help="host:port or URL of a metaserver, of the balancer before them, or several separated by commas; "
        f"default: the variable {METASERVER_VARIABLE}",
    )
    common.add_argument(
        "--token-file",
        action=_Once,
        metavar="PATH",
        help="file with the API token, - for standard input; default: QMQ_TOKEN, or the file that QMQ_TOKEN_FILE names",
    )
    common.add_argument("--token", action=_Once, help="the API token, as QMQ takes it: the process list shows it")
    as_json = "print JSON" if command.runs else "print the metaserver's answer as it is"
    common.add_argument("--json", action="store_true", help=as_json)
    if command.changes:
        common.add_argument("--dry-run", action="store_true", help="show the plan and change nothing")
        common.add_argument("--yes", action="store_true", help="skip the confirmation; required without a terminal")


def _add_option(sub: argparse.ArgumentParser, option: Option, now_ms: int) -> None:
    text = option.help + (f" (default: {option.default})" if option.default and "default" not in option.help else "")
    action = _Pairs if option.kind is Kind.PAIR else _Once
    shape: dict[str, Any] = {"action": action, "dest": _dest(option), "help": text.replace("%", "%%")}
    if option.alone:
        shape |= {"nargs": "?", "const": option.alone}
    if option.kind is Kind.FLAG:
        shape |= {"metavar": "true|false"}
    elif not option.choices:
        shape |= {"metavar": option.kind.value}
    if option.kind is Kind.SECRET:
        sub.add_argument(f"--{option.name}-file", **shape | {"metavar": "PATH", "dest": f"{_dest(option)}_file"})
        sub.add_argument(f"--{option.name}", **shape | {"help": "the same, as QMQ takes it: the process list shows it"})
        return
    read = partial(_TIMES[option.kind], now_ms=now_ms) if option.kind in _TIMES else _READ.get(option.kind, str)
    required = option.default is None
    sub.add_argument(f"--{option.name}", **shape, required=required, choices=option.choices or None, type=read)


def _dest(option: Option) -> str:
    return f"option_{option.name}"


def _number(text: str) -> str:
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return text


def _port(text: str) -> str:
    if not 1 <= int(_number(text)) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return text


def _seconds(text: str) -> str:
    return str(int(_number(text)) * 1000)


def _flag(text: str) -> str:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower()


def _moment(text: str, *, now_ms: int) -> str:
    """Return milliseconds since 1970 for a date, a time, an age or, with a plus, a time from now; numbers stay."""
    if away := _AWAY.fullmatch(text):
        away_ms = int(away[2]) * _UNIT_S[away[3]] * 1000
        return str(now_ms + away_ms if away[1] else now_ms - away_ms)
    if text.isascii() and text.isdigit() and len(text) <= 19:
        return text
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; use 2026-01-31T12:00:00Z, 90m (ago), +90m or milliseconds since 1970"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return str(round(moment.timestamp() * 1000))


def _start(text: str, *, now_ms: int) -> str:
    return text if text in ("latest", "earliest") else _moment(text, now_ms=now_ms)


def _addresses(text: str) -> tuple[Address, ...]:
    try:
        return Address.parse_several(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_TIMES = {Kind.MOMENT: _moment, Kind.START: _start}
_READ = {Kind.NUMBER: _number, Kind.PORT: _port, Kind.SECONDS: _seconds, Kind.FLAG: _flag}


_COMMON = {"--metaserver": True, "--token-file": True, "--json": False, "--help": False}
_CHANGES = ("--dry-run", "--yes")
_NOTHING: Mapping[str, Sequence[str]] = MappingProxyType({})
_FUNCTIONS = {"tools.sh": "_qmq_tools", "qmq": "_qmq"}
"""Function name by program; a shell may source both scripts."""


def completion(shell: str, *, program: str = "tools.sh", others: Mapping[str, Sequence[str]] = _NOTHING) -> str:
    """Return the completion script for a shell.

    Args:
        others: further commands of `program`, each with the words that may follow it.
    """
    if shell == "bash":
        return _script("=", program, others)
    # zsh runs bash's functions, but adds a blank after each word, so a value is a word of its own there.
    script = _script("", program, others)
    return f"#compdef {program}\n{_ZSH}{script}"


def _words(command: Command, equals: str) -> Iterator[str]:
    for name, takes_value in (*map(_option, command.options), *_COMMON.items()):
        yield name + equals * takes_value
    yield from _CHANGES * command.changes


def _option(option: Option) -> tuple[str, bool]:
    """Return the option as offered, and whether a value follows it."""
    name = f"--{option.name}-file" if option.kind is Kind.SECRET else f"--{option.name}"
    return name, not option.alone


def _choices(command: Command) -> Iterator[tuple[str, str]]:
    """Yield options with a fixed set of values, and these values."""
    for option in command.options:
        if option.choices:
            yield f"--{option.name}", " ".join(option.choices)


def _script(equals: str, program: str, others: Mapping[str, Sequence[str]]) -> str:
    words = {name: [word.replace("=", equals) for word in more] for name, more in others.items()}
    words |= {name: list(_words(command, equals)) for name, command in COMMANDS.items()}
    cases = "\n".join(f'        {name}) echo "{" ".join(more)}" ;;' for name, more in words.items())
    values = "\n".join(
        f'        {name}:{option}) echo "{choices}" ;;'
        for name, command in COMMANDS.items()
        for option, choices in _choices(command)
    )
    return _BASH.format(
        program=program,
        function=_FUNCTIONS[program],
        names=" ".join([*words, "completion"]),
        cases=cases,
        values=values,
    )


_ZSH = """\
# Debian's zsh does not load completion by itself; bashcompinit builds on it.
(( $+functions[compdef] )) || { autoload -U compinit && compinit -i -D; }
autoload -U +X bashcompinit && bashcompinit
"""

_BASH = """\
# Completion of {program}: source <({program} completion bash), or zsh

{function}_options() {{
    case "$1" in
{cases}
        completion) echo "bash zsh" ;;
    esac
}}

{function}_values() {{
    case "$1:$2" in
{values}
    esac
}}

# bash takes `=` for the end of a word, so `--option=value` arrives as three words; zsh leaves it one.
{function}() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" last="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]:-}}" option="" prefix=""
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W "{names}" -- "$current"))
        return
    fi
    if [[ "$current" == --*=* ]]; then
        option="${{current%%=*}}" prefix="${{current%%=*}}="
        current="${{current#*=}}"
    elif [[ "$current" == "=" ]]; then
        option="$last" current=""
    elif [[ "$last" == "=" ]]; then
        option="${{COMP_WORDS[COMP_CWORD-2]}}"
    elif [[ "$current" != -* && "$last" == --* ]]; then
        option="$last"
    fi
    case "$option" in
        "")
            COMPREPLY=($(compgen -W "$({function}_options "$command")" -- "$current"))
            if [[ "${{COMPREPLY[0]:-}}" == *= ]]; then compopt -o nospace 2>/dev/null; fi ;;
        --file|--out|--token-file|--password-file|--config|--dir|--input)
            COMPREPLY=($(compgen -P "$prefix" -f -- "$current")) ;;
        *)
            COMPREPLY=($(compgen -P "$prefix" -W "$({function}_values "$command" "$option")" -- "$current")) ;;
    esac
}}
complete -F {function} {program}
"""
