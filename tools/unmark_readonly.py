"""Core. UnMarkReadonly: take back MarkReadonly, with the same subject."""

from __future__ import annotations

from typing import Any

from tools.command import GROUP, Command
from tools.mark_readonly import SUBJECT


def render(_: Any) -> str:
    return "the mark is removed"


COMMAND = Command(
    name="UnMarkReadonly",
    help="take back MarkReadonly, with the same subject",
    action="UnMarkReadonlyBrokerGroup",
    options=(GROUP, SUBJECT),
    render=render,
)
