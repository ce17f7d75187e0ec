"""Core. Operators' commands: name, options, request to the metaserver, display of the answer."""

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
"""Added to the longest time that the metaserver takes."""


class Kind(Enum):
    """Form of an option's value on the command line."""

    TEXT = "TEXT"
    NUMBER = "NUMBER"
    PORT = "PORT"
    FLAG = "flag"
    """`--force` alone, or `--force=true`."""
    SECRET = "SECRET"
    """Read from a file, standard input or a prompt; on the command line it works, with a warning."""
    PAIR = "NAME=VALUE"
    """May be given several times; all pairs form one JSON object."""
    FILE = "FILE"
    """The content of the file is sent; `-` is standard input."""
    LINES = "FILE|-"
    """File read line by line as needed; `-` is standard input."""
    BODY = "TEXT|@FILE"
    """A text, or a file read as it is; `@-` is standard input."""
    SECONDS = "SECONDS"
    """Sent as milliseconds."""
    PATH = "PATH"
    """File to write."""
    MOMENT = "TIME"
    """`2026-01-31`, `2026-01-31T12:00:00Z`, `90m` ago or `+90m` from now; sent as milliseconds since 1970."""
    START = "latest|earliest|TIME"
    """A moment, or `latest` or `earliest`."""


Arguments = Mapping[str, str]
"""Arguments of an action, by name of the parameter."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command."""

    name: str
    help: str
    default: str | None = None
    """None: the option is required. An empty default is not sent."""
    kind: Kind = Kind.TEXT
    sent_as: str = ""
    """Name of the metaserver's parameter, if different."""
    choices: tuple[str, ...] = ()
    alone: str = ""
    """Value of an option that is typed without one."""
    local: bool = False
    """Used by the tool itself and not sent."""
    unless: Callable[[Arguments], bool] = lambda _: False
    """Whether other options make this secret unnecessary."""

    @property
    def parameter(self) -> str:
        return self.sent_as or self.name


@dataclass(frozen=True, slots=True)
class Command:
    """One operator's command."""

    name: str
    help: str
    example: str
    """Options as typed."""
    options: tuple[Option, ...] = ()
    show: Callable[[Any], Iterable[Block]] = lambda _: ["done"]
    """Display of the result."""
    action: str = ""
    """Name of the metaserver's action, if different."""
    changes: bool = False
    """A change is planned and confirmed and needs a token; without an answer its outcome is unknown."""
    look: str = ""
    """Command that shows whether a change was made; {option} is filled in."""
    has_details: bool = False
    """The metaserver answers QMQ's fields, and all fields on request."""
    timeout_s: float = 0
    """Limit for the answer, above the longest time of the metaserver with its waits for database and brokers; 0: the
    usual limit.
    """
    keep: Callable[[Any], tuple[str, dict[str, Any]]] | None = None
    """Return the text for the file of a PATH option, and the part of the result that is still shown."""
    runs: str = ""
    """`module:function` of commands that are no action of the metaserver; imported when used, which keeps the others
    fast.
    """
    is_local: bool = False
    """Reads files of this machine only; needs neither metaserver nor token."""
    fault_of: Callable[[Arguments], str] = lambda _: ""
    """Return the fault in the combination of options, or an empty text."""

    @property
    def action_name(self) -> str:
        return self.action or self.name

    def arguments(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return the arguments to send; empty values take the metaserver's default."""
        sent = {option.parameter: values[option.name] for option in self.options if not option.local}
        sent = {name: value for name, value in sent.items() if value != ""}
        return {"action": self.action_name, **sent, **({"details": "true"} if self.has_details else {})}

    def wait_s(self, arguments: Arguments) -> float:
        """Return how long to wait for the answer."""
        usual_s = CHANGE_TIMEOUT_S if self.changes else LIST_TIMEOUT_S
        return (self.timeout_s or usual_s) + int(arguments.get(WAIT_PARAMETER, "0")) / 1000

    def look_with(self, metaserver: object, values: Mapping[str, str], *, program: str = "tools.sh") -> str:
        """Return the command line that shows the outcome of a change."""
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
    secret_unless: Callable[[Arguments], bool] = lambda _: False,
    keep: Callable[[Any], tuple[str, dict[str, Any]]] | None = None,
    fault_of: Callable[[Arguments], str] = lambda _: "",
) -> Command:
    """Make the command of a metaserver's action from its entry in `qmq.commands`.

    Args:
        typed: name of the command, if it differs from the action's.
        more: options that only the tool reads.
        secret_unless: whether the other options make a secret unnecessary.
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
        fault_of=fault_of,
    )


_KINDS = {Value.NUMBER: Kind.NUMBER, Value.PORT: Kind.PORT, Value.FLAG: Kind.FLAG, Value.JSON: Kind.FILE}
_TYPED = {Typed.MOMENT: Kind.MOMENT, Typed.SECONDS: Kind.SECONDS}
_TYPED_HELP = {Typed.MOMENT: " (2026-01-31T12:00:00Z; 90m: ago)", Typed.SECONDS: " (60 s if no number is given)"}
_ALONE = {Value.FLAG: "true", Typed.SECONDS: "60"}


def _option(parameter: Parameter, secret_unless: Callable[[Arguments], bool]) -> Option:
    """Make the option of a parameter. Only defaults of names are sent, as QMQ's tools do; the help shows the others."""
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
        unless=secret_unless,
    )


def listing(table: Callable[[Any], Table]) -> Callable[[Any], Iterable[Block]]:
    """Return a command's `show` that makes one table."""
    return lambda data: [table(data)]


def good(text: str) -> Cell:
    return Cell(text, Tone.GOOD)


def warning(text: str) -> Cell:
    return Cell(text, Tone.WARN)


def bad(text: str) -> Cell:
    return Cell(text, Tone.BAD)


GROUP = Option("brokerGroup", "name of the broker group")
SUBJECT = Option("subject", "name of the subject")
ANY_SUBJECT = Option("subject", "only this subject", default="")
