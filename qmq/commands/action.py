"""Core. Operators' commands as one table: action, parameters, rights, help.

The metaserver checks requests and describes its HTTP API from this table; the tools build their commands, usage and
completion from it. The client library does not load it. Actions that change something are planned first; with
`dryRun=true` the plan is the answer; its changes are shown value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

from qmq.rights import TokenRole

DRY_RUN = "dryRun"
IF_PLAN = "ifPlan"
DETAILS = "details"


class Kind(StrEnum):
    """Kind of a parameter's value."""

    TEXT = "text"
    NAME = "name"
    """A name by the rules of `qmq.subjects`."""
    PATTERN = "pattern"
    """A name, or `*` for all."""
    NAMES = "names"
    """Names, separated by commas."""
    NUMBER = "number"
    PORT = "port"
    FLAG = "flag"
    """`true` or `false`."""
    CHOICE = "choice"
    """One of `choices`."""
    JSON = "json"


class Typed(StrEnum):
    """Text on the command line, where it differs from the value that is sent."""

    AS_SENT = ""
    MOMENT = "moment"
    """A date, a time or an age; sent as milliseconds since 1970."""
    SECONDS = "seconds"
    """Sent as milliseconds."""


class Style(StrEnum):
    """Style of an action's answer on /management, as in QMQ."""

    STANDARD = "standard"
    """`{"status", "message", "data"}`."""
    MAP = "map"
    """`{"data"}` or `{"error"}`, the latter with details where there are some."""
    RAW = "raw"
    """The bare result. A failed list is answered as STANDARD, a refused change as MAP."""


class Status(IntEnum):
    """Outcome of an action; the field `status` of an answer. The first two are QMQ's."""

    DONE = 0
    REFUSED = -1
    UNKNOWN = -2
    """The change may have been made; a look-up afterwards did not show it."""
    WAIT = -3
    """Nothing was changed, because a needed process does not answer. Repeat later."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an action. Values travel as text."""

    name: str
    description: str
    required: bool = False
    kind: Kind = Kind.TEXT
    default: str = ""
    secret: bool = False
    """Whether the value is a secret, which is not logged, recorded or answered."""
    choices: tuple[str, ...] = ()
    least: int = 0
    most: int = 2**63 - 1
    chars_max: int = 100
    option: str = ""
    """Name on the command line, where it differs."""
    typed: Typed = Typed.AS_SENT

    @property
    def sent_help(self) -> str:
        """The description, with the unit of the value that is sent."""
        return self.description + _UNITS[self.typed]


_UNITS = {Typed.AS_SENT: "", Typed.MOMENT: ", in milliseconds since 1970", Typed.SECONDS: ", in milliseconds"}


@dataclass(frozen=True, slots=True)
class Action:
    """One operator's action."""

    name: str
    summary: str
    role: TokenRole
    """Role that the caller needs."""
    parameters: tuple[Parameter, ...] = ()
    changes: bool = False
    style: Style = Style.STANDARD
    needs_token: bool = True
    """False if QMQ answers the action without a token, as the metaserver does with the setting `open_lists`."""
    result_fields: tuple[str, ...] = ()
    """Fields of QMQ's result objects, in its order; /management shows no others unless `details=true`."""
    qmq_data: Callable[[Any], Any] | None = None
    """Function for the data on /management, unless `details=true`; `result_fields` is for all other results."""
    installation: bool = False
    """Whether the action concerns the whole installation, so that tokens limited to subjects or groups are refused."""
    decides_database: bool = False
    """Whether the action may use a database that was set aside, because it decides whether that one counts."""
    wait_ms: int = 15_000
    """Time that a caller should wait for the answer, in addition to a parameter `waitMs`."""

    @property
    def has_details(self) -> bool:
        """Whether /management answers QMQ's fields only, and all fields with `details=true`."""
        return bool(self.result_fields or self.qmq_data)

    @property
    def all_parameters(self) -> tuple[Parameter, ...]:
        """The parameters, with those that all actions of this kind have."""
        both = (_DETAILS,) if self.has_details else ()
        return (*self.parameters, *both, _DRY_RUN, _IF_PLAN) if self.changes else (*self.parameters, *both)

    def parameter(self, name: str) -> Parameter | None:
        return next((parameter for parameter in self.all_parameters if parameter.name == name), None)


_DRY_RUN = Parameter(DRY_RUN, "return the plan and change nothing", kind=Kind.FLAG, default="false")
_IF_PLAN = Parameter(IF_PLAN, "field `plan` of the dryRun: the change is refused if the plan differs by now")
_DETAILS = Parameter(DETAILS, "return all fields, not only QMQ's", kind=Kind.FLAG, default="false")


class Difference(NamedTuple):
    """Change of one value in a plan.

    A broker that is added, removed or replaced is one difference, not one for each of its ports.
    """

    path: str
    """Path of field names, with dots; "value" for the whole."""
    before: Any
    after: Any
    """None if absent."""


def differences(before: Any, after: Any, path: str = "") -> list[Difference]:
    """Return the differences in the order of the old fields, then of the new ones."""
    if isinstance(before, Mapping | None) and isinstance(after, Mapping | None):
        old, new = before or {}, after or {}
        if _broker(old) == _broker(new):
            return [
                difference
                for name in dict.fromkeys([*old, *new])
                for difference in differences(old.get(name), new.get(name), f"{path}.{name}" if path else str(name))
            ]
        if (not old or _broker(old)) and (not new or _broker(new)):
            return [Difference(path, _as_text(old), _as_text(new))]
    return [] if before == after else [Difference(path or "value", before, after)]


def _broker(value: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return the identity of a broker, or None if the value is no broker."""
    return (value["hostname"], value["servePort"]) if "hostname" in value and "servePort" in value else None


def _as_text(broker: Mapping[str, Any]) -> str | None:
    if not broker:
        return None
    more = [str(broker[name]) for name in ("role", "ip") if broker.get(name)]
    more += [f"sync {broker['syncPort']}"] if "syncPort" in broker else []
    return f"{broker['hostname']}:{broker['servePort']}" + (f" ({', '.join(more)})" if more else "")
