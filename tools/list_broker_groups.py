"""Core. ListBrokerGroups: state and term of each group."""

from __future__ import annotations

from typing import Any

from tools.command import Command
from tools.table import render_table


def render(groups: Any) -> str:
    head = ("GROUP", "TERM", "MASTER", "SLAVE", "WRITABLE", "REASONS", "READONLY SUBJECTS")
    return render_table(
        head,
        [
            (
                group["groupName"],
                group["term"],
                group["master"],
                ",".join(group["slaves"]),
                group["writable"],
                ",".join(group["readonlyReasons"]),
                ",".join(group["readonlySubjects"]),
            )
            for group in groups
        ],
    )


COMMAND = Command(
    name="ListBrokerGroups",
    help="list broker groups: term, master and slave, whether they take messages and why not",
    action="ListBrokerGroups",
    options=(),
    render=render,
    changes=False,
)
