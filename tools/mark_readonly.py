"""Core. MarkReadonly: keep producers away from a group; consumers stay."""

from __future__ import annotations

from typing import Any

from tools.command import GROUP, Command, Option

SUBJECT = Option("subject", "one subject; default: *, all of them", default="*")


def render(_: Any) -> str:
    return "marked readonly; producers turn to other groups within a second"


COMMAND = Command(
    name="MarkReadonly",
    help="keep producers away from a broker group; consumers go on",
    action="MarkReadonlyBrokerGroup",
    options=(GROUP, SUBJECT),
    render=render,
)
