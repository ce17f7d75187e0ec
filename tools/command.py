"""Core. What a command is: its name, its options, what it asks of the metaserver, how its answer reads."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from qmq.commands.action import Kind as Value
from qmq.commands.action import Parameter, Typed
from qmq.commands.catalog import ACTIONS
from qmq.tools.table import Block, Cell, Table, Tone

WAIT_PARAMETER = "waitMs"
LIST_TIMEOUT_S, CHANGE_TIMEOUT_S = 20.0, 90.0
ANSWER_MARGIN_S = 30.0
"""Added to the time that the metaserver takes at most."""


class Kind(Enum):
    """What is typed as the value of an option."""

    TEXT = "TEXT"
    NUMBER = "NUMBER"
    PORT = "PORT"
    FLAG = "flag"
    """`--force` alone, or `--force=true`."""
    SECRET = "SECRET"
    """Read from a file, standard input or a prompt; on the command line it works, with a warning."""
    PAIR = "NAME=VALUE"
    """May be given several times; together they are one JSON object."""
    FILE = "FILE"
    """The content of the file is sent; `-` is standard input."""
    LINES = "FILE|-"
    """A file that is read line by line as its lines are needed; `-` is standard input."""
    SECONDS = "SECONDS"
    """Sent as milliseconds."""
    PATH = "PATH"
    """A file to write."""
    MOMENT = "TIME"
    """`2026-01-31`, `2026-01-31T12:00:00Z`, `90m` ago or `+90m` from now; sent as milliseconds since 1970."""
    START = "latest|earliest|TIME"
    """A moment, or one of the two words."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command."""

    name: str
    help: str
    default: str | None = None
    """None: the option is required. An empty default is not sent."""
    kind: Kind = Kind.TEXT
    sent_as: str = ""
    """Name of the metaserver's parameter, if it is another one."""
    choices: tuple[str, ...] = ()
    alone: str = ""
    """The value if the option stands without one."""
    local: bool = False
    """Not sent: what the tool itself does."""
    not_with: tuple[str, str] = ("", "")
    """Another option and its value with which a secret is not asked for."""

    @property
    def parameter(self) -> str:
        return self.sent_as or self.name


Words = Mapping[str, str]
"""Parameters of an action, by name."""


@dataclass(frozen=True, slots=True)
class Command:
    """One operator's command."""

    name: str
    help: str
    example: str
    """Options as they are typed."""
    options: tuple[Option, ...] = ()
    show: Callable[[Any], Iterable[Block]] = lambda _: ["done"]
    """The result as people read it."""
    action: str = ""
    """The metaserver's name for it, if it is another one."""
    changes: bool = False
    """Then it is planned and confirmed, needs a token, and a lost answer leaves its outcome unknown."""
    look: str = ""
    """Which command tells whether a change was made; {option} is filled in."""
    has_details: bool = False
    """The metaserver answers QMQ's fields, and all that it knows only if asked."""
    timeout_s: float = 0
    """Longer than the metaserver takes at most, its waiting for database and brokers included; 0: the usual."""
    keep: Callable[[Any], tuple[str, dict[str, Any]]] | None = None
    """What goes into the file that a PATH option names, and what of the result is shown all the same."""
    runs: str = ""
    """`module:function` that runs the command, for commands that are no action of the metaserver. Imported only then,
    because the import takes longer than most commands."""
    is_local: bool = False
    """It reads files of this machine and asks nobody: it needs neither metaserver nor token."""
    needs: Callable[[Words], str] = lambda _: ""
    """What is wrong with these words together; empty: nothing."""

    @property
    def asks(self) -> str:
        return self.action or self.name

    def words(self, values: Mapping[str, str]) -> dict[str, str]:
        """Turn the values of the options into what is sent; what is empty is left to the metaserver's default."""
        sent = {option.parameter: values[option.name] for option in self.options if not option.local}
        sent = {name: value for name, value in sent.items() if value != ""}
        return {"action": self.asks, **sent, **({"details": "true"} if self.has_details else {})}

    def wait_s(self, words: Words) -> float:
        """How long to wait for the answer."""
        usual_s = CHANGE_TIMEOUT_S if self.changes else LIST_TIMEOUT_S
        return (self.timeout_s or usual_s) + int(words.get(WAIT_PARAMETER, "0")) / 1000

    def look_with(self, metaserver: object, values: Mapping[str, str], *, program: str = "tools.sh") -> str:
        """Write the command line that tells what became of a change."""
        name, *options = self.look.format_map({name: shlex.quote(value) for name, value in values.items()}).split(" ")
        return " ".join([program, name, f"--metaserver={metaserver}", *options])


def of_action(
    name: str,
    example: str,
    show: Callable[[Any], Iterable[Block]] = lambda _: ["done"],
    *,
    typed: str = "",
    look: str = "",
    more: tuple[Option, ...] = (),
    secret_unless: tuple[str, str] = ("", ""),
    keep: Callable[[Any], tuple[str, dict[str, Any]]] | None = None,
    needs: Callable[[Words], str] = lambda _: "",
) -> Command:
    """Make the command of a metaserver's action: `qmq.commands` has its help, its parameters and what it changes.

    Args:
        typed: name of the command, if it differs from the action's.
        more: options that only the tool reads.
        secret_unless: an option and its value with which the action needs no secret.
    """
    action = ACTIONS[name]
    usual_s = CHANGE_TIMEOUT_S if action.changes else LIST_TIMEOUT_S
    return Command(
        typed or name,
        action.summary,
        example,
        (*(_option(parameter, secret_unless) for parameter in action.parameters), *more),
        show,
        action=name,
        changes=action.changes,
        look=look,
        has_details=action.has_details,
        timeout_s=max(usual_s, action.wait_ms / 1000 + ANSWER_MARGIN_S),
        keep=keep,
        needs=needs,
    )


_KINDS = {Value.NUMBER: Kind.NUMBER, Value.PORT: Kind.PORT, Value.FLAG: Kind.FLAG, Value.JSON: Kind.FILE}
_TYPED = {Typed.MOMENT: Kind.MOMENT, Typed.SECONDS: Kind.SECONDS}
_TYPED_HELP = {Typed.MOMENT: " (2026-01-31T12:00:00Z; 90m: ago)", Typed.SECONDS: " (60 s if no number is given)"}
_ALONE = {Value.FLAG: "true", Typed.SECONDS: "60"}


def _option(parameter: Parameter, secret_unless: tuple[str, str]) -> Option:
    """Make the option of a parameter. The tool sends defaults of names, as QMQ's do; its help shows the others."""
    kind = Kind.SECRET if parameter.secret else _KINDS.get(parameter.kind, Kind.TEXT)
    default = parameter.default if parameter.kind in (Value.NAME, Value.PATTERN) else ""
    help = parameter.description + _TYPED_HELP.get(parameter.typed, "")
    if parameter.default not in ("", "false", "0", default):
        help += f" (default: {parameter.default})"
    return Option(
        parameter.option or parameter.name,
        help,
        None if parameter.required else default,
        _TYPED.get(parameter.typed, kind),
        sent_as=parameter.name,
        choices=parameter.choices,
        alone=_ALONE.get(parameter.kind, "") or _ALONE.get(parameter.typed, ""),
        not_with=secret_unless if parameter.secret else ("", ""),
    )


def listing(table: Callable[[Any], Table]) -> Callable[[Any], Iterable[Block]]:
    """Make a command's `show` of a function that makes one table."""
    return lambda data: [table(data)]


def good(text: str) -> Cell:
    return Cell(text, Tone.GOOD)


def warning(text: str) -> Cell:
    return Cell(text, Tone.WARN)


def bad(text: str) -> Cell:
    return Cell(text, Tone.BAD)


GROUP = Option("brokerGroup", "name of the broker group")
ANY_GROUP = Option("brokerGroup", "only this broker group", default="")
SUBJECT = Option("subject", "name of the subject")
ANY_SUBJECT = Option("subject", "only this subject", default="")
FORCE = Option("force", "do it in spite of the reasons against it", default="", kind=Kind.FLAG, alone="true")
