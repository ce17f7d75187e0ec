"""Core. Commands for the installation: its metaservers and its health."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from qmq.tools.command import Command, Kind, Option, bad, good, listing, of_action, warning
from qmq.tools.table import Block, Cell, Column, Table, good_or_bad


def _metaservers(rows: Any) -> Table:
    return Table(
        (
            Column("HTTP", "http"),
            Column("GRPC", "grpc"),
            Column("VERSION", "version", drop=2),
            Column("UP", good_or_bad("up")),
            Column("ANSWERED THIS", "answersThis", drop=1),
            Column("ID", "id", drop=3),
        ),
        rows,
    )


def _adopted(data: Any) -> Iterable[Block]:
    groups = ", ".join(data["groups"])
    if data["keep"] == "memory":
        yield good(f"the database has this metaserver's groups, {groups} among them")
    else:
        yield good(f"the database is used as it is; {groups}: forgotten")


_LEVEL = {"OK": good, "WARN": warning, "FAIL": bad}


def _level(finding: Mapping[str, Any]) -> Cell:
    return _LEVEL[finding["level"]](finding["level"])


def _findings(findings: Any) -> Iterable[Block]:
    columns = (Column("", _level), Column("STEP", "step"), Column("FOUND", "found", fold=30))
    yield Table(columns, list(_brief(findings)))
    todo = [finding for finding in findings if finding["do"]]
    for finding in todo:
        yield ""
        yield _LEVEL[finding["level"]](f"{finding['level']} {finding['step']}: {finding['found']}")
        yield f"  {finding['do']}"
    yield ""
    yield warning(f"{len(todo)} to look at") if todo else good("nothing is wrong")


def _brief(findings: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield all failures, and the first success of each step with the number of the others."""
    by_step: dict[str, list[Mapping[str, Any]]] = {}
    for finding in findings:
        by_step.setdefault(finding["step"], []).append(finding)
    for of_step in by_step.values():
        fine = [finding for finding in of_step if finding["level"] == "OK"]
        if fine:
            more = f" (and {len(fine) - 1} more)" if len(fine) > 1 else ""
            yield {**fine[0], "found": fine[0]["found"] + more}
        yield from (finding for finding in of_step if finding["level"] != "OK")


INSTALLATION = (
    of_action("ListMetaservers", "", listing(_metaservers)),
    of_action("AdoptDatabase", "--keep=memory", _adopted, look="Doctor"),
    Command(
        "Doctor",
        "check an installation from this machine: names, ports, versions, clocks, token, "
        "roles, copies, disks. Ends with 1 if a step failed",
        "",
        (
            Option(
                "transitions",
                "show each broker's states as well, and its last moves between them",
                "",
                Kind.FLAG,
                alone="true",
                local=True,
            ),
        ),
        show=_findings,
        timeout_s=45,
    ),
)
