"""Core. Operators' commands as one table: action, parameters, rights, help.

The metaserver checks requests and describes its HTTP API from this table; the tools build their commands, usage and
completion from it. The client library does not load it. Actions that change something are planned first; with
`dryRun=true` the plan is the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

from qmq.rights import TokenRole

DRY_RUN = "dryRun"
IF_PLAN = "ifPlan"
DETAILS = "details"


class Kind(StrEnum):
    """What the text of a parameter has to be."""

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
    """How QMQ words the answer of an action on /management."""

    STANDARD = "standard"
    """`{"status", "message", "data"}`."""
    MAP = "map"
    """`{"data"}` or `{"error"}`, the latter maybe with details."""
    RAW = "raw"
    """The bare result; a list that fails answers as STANDARD does, a change that is refused as MAP does."""


class Status(IntEnum):
    """What became of an action; the field `status` of an answer. The first two are QMQ's."""

    DONE = 0
    REFUSED = -1
    UNKNOWN = -2
    """The change is made or not, and looking again did not tell."""
    WAIT = -3
    """Nothing was changed; something that is needed does not answer now. Repeat later."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an action. Values travel as text."""

    name: str
    description: str
    required: bool = False
    kind: Kind = Kind.TEXT
    default: str = ""
    secret: bool = False
    """Never written down: not logged, not recorded, not answered."""
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
    """Which role's rights a caller needs."""
    parameters: tuple[Parameter, ...] = ()
    changes: bool = False
    style: Style = Style.STANDARD
    needs_token: bool = True
    """False: QMQ answers it to everybody; so do we, if the setting `open_lists` says so."""
    result_fields: tuple[str, ...] = ()
    """Fields of QMQ's result objects, in its order; /management shows no others unless `details=true`."""
    qmq_data: Callable[[Any], Any] | None = None
    """What /management answers as data in place of ours, unless `details=true`; `result_fields` for other results."""
    installation: bool = False
    """It concerns the installation as a whole: a token that is limited to subjects or groups is not enough."""
    decides_database: bool = False
    """It reaches a database that was set aside: it decides what becomes of that."""
    wait_ms: int = 15_000
    """A caller should wait so long for the answer, and longer by what a `waitMs` parameter says."""

    @property
    def has_details(self) -> bool:
        """Whether /management answers QMQ's fields only, and all fields with `details=true`."""
        return bool(self.result_fields or self.qmq_data)

    @property
    def all_parameters(self) -> tuple[Parameter, ...]:
        """The parameters, and those that every action of this sort has."""
        both = (_DETAILS,) if self.has_details else ()
        return (*self.parameters, *both, _DRY_RUN, _IF_PLAN) if self.changes else (*self.parameters, *both)

    def parameter(self, name: str) -> Parameter | None:
        return next((parameter for parameter in self.all_parameters if parameter.name == name), None)


_DRY_RUN = Parameter(DRY_RUN, "return the plan and change nothing", kind=Kind.FLAG, default="false")
_IF_PLAN = Parameter(IF_PLAN, "field `plan` of the dryRun: the change is refused if the plan differs by now")
_DETAILS = Parameter(DETAILS, "return all fields, not only QMQ's", kind=Kind.FLAG, default="false")
