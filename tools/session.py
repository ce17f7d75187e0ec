"""Shell. Runs one command: plan, confirmation, change, answer.

The plan is shown before the operator confirms it: the changes field by field, and the subjects, groups and clients that
they affect.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from qmq.access import Token, token_text
from qmq.commands.action import differences
from qmq.tools.call import Address, Answer, CallFailed, Exit, post, reachable
from qmq.tools.command import Command, Kind, bad, good, warning
from qmq.tools.doctor import examine
from qmq.tools.files import FILE_MARK, STANDARD_STREAM, NoInput, PrivateFile, read_document, read_password, read_token
from qmq.tools.findings import Level, worst
from qmq.tools.table import Block, Cell, Column, Table, to_cell, utc
from qmq.tools.terminal import as_typed, complain, confirm, is_interactive, program, show

TOKEN_PLACES = "QMQ_TOKEN, QMQ_TOKEN_FILE or --token-file (- is standard input)"


class CannotAsk(Exception):
    """A change needs confirmation and there is no terminal."""


@dataclass(frozen=True, slots=True)
class Session:
    """One command with its inputs. Made by `open`."""

    command: Command
    metaserver: Address
    token_source: Token
    values: Mapping[str, str]
    """By option, with secrets and contents of files."""
    as_json: bool
    dry_run: bool
    yes: bool

    @property
    def token(self) -> str:
        """Present token: its file may change while a command runs for hours."""
        return token_text(self.token_source)

    @classmethod
    def open(cls, options: argparse.Namespace) -> Session:
        """Read the token, secrets and files. Raises NoInput, CannotAsk."""
        command: Command = options.command
        if problem := command.fault_of(command.arguments(options.values)):
            raise NoInput(problem)
        dry_run, yes = getattr(options, "dry_run", False), getattr(options, "yes", False)
        if command.changes and not dry_run and not yes and not is_interactive(sys.stdin):
            raise CannotAsk(
                f"{command.name} needs confirmation, and there is no terminal: use --yes, or --dry-run to see the plan"
            )
        token = read_token(options.token, options.token_file)
        if (command.changes or command.runs) and not token and not command.is_local:
            raise NoInput(f"{command.name} needs a token: {TOKEN_PLACES}")
        values = _values(command, options)
        metaserver = options.metaserver and reachable(options.metaserver)
        return cls(command, metaserver, token, values, options.json, dry_run, yes)

    def run(self) -> Exit:
        """Run the command; return the exit status. Raises OSError if a file cannot be written."""
        if self.command.runs:
            module, _, function = self.command.runs.partition(":")
            exit_status: Exit = getattr(import_module(module), function)(self)
            return exit_status
        arguments = self.command.arguments(self.values)
        try:
            if self.command.name == "Doctor":
                return self._examine()
            if self.command.changes and (ended := self._plan(arguments)) is not None:
                return ended
        except CallFailed as error:
            return _fail(Exit.UNREACHABLE, f"{error}. Nothing was changed")
        path = self._path()
        with PrivateFile(path) if path not in ("", STANDARD_STREAM) else nullcontext() as file:
            return self._finish(arguments, file)

    def _plan(self, arguments: Mapping[str, str]) -> Exit | None:
        """Show the plan and confirm it; return the exit status if the command ends here, else None."""
        timeout_s = self.command.wait_s({})
        answer = post(self.metaserver, self.token, {**arguments, "dryRun": "true"}, timeout_s=timeout_s)
        reason = answer.message if answer.exit is not Exit.DONE else refusal(answer.data)
        if self.as_json and (self.dry_run or reason):
            _print_json(answer.raw)
        if answer.exit is not Exit.DONE and not _is_plan(answer.data):
            return _fail(Exit.UNREACHABLE if answer.exit is Exit.UNKNOWN else answer.exit, reason)
        if not (self.as_json and self.dry_run):
            show(
                show_plan(self.command, self._shown(arguments), answer.data), sys.stdout if self.dry_run else sys.stderr
            )
        if reason:
            return _fail(Exit.REFUSED, reason)
        if self.dry_run:
            return Exit.DONE
        if not self.yes and not confirm("Do it?"):
            return _fail(Exit.REFUSED, "not confirmed; nothing was changed")
        return None

    def _finish(self, arguments: Mapping[str, str], file: PrivateFile | None) -> Exit:
        """Run the command and show the answer."""
        command = self.command
        try:
            answer = post(self.metaserver, self.token, arguments, timeout_s=command.wait_s(arguments))
        except CallFailed as error:
            if command.changes and error.sent:
                return self._unknown(str(error))
            return _fail(Exit.UNREACHABLE, str(error))
        except KeyboardInterrupt:
            return self._unknown("interrupted") if command.changes else _fail(Exit.UNREACHABLE, "interrupted")
        if answer.exit is not Exit.DONE and self.as_json:
            _print_json(answer.raw)
        if answer.exit is Exit.UNKNOWN:
            return self._unknown(answer.message) if command.changes else _fail(Exit.UNREACHABLE, answer.message)
        if answer.exit is not Exit.DONE:
            hint = "" if self.token else f"; a token comes from {TOKEN_PLACES}"
            return _fail(answer.exit, answer.message + hint)
        try:
            self._show(answer, file)
        except (OSError, KeyboardInterrupt) as error:
            if not command.changes:
                raise
            why = f"the change is made, but its result could not be written: {str(error) or 'interrupted'}. Look with"
            return _fail(Exit.UNKNOWN, f"{why}\n  {self.look()}")
        return Exit.DONE

    def _show(self, answer: Answer, file: PrivateFile | None) -> None:
        data, raw = answer.data, answer.raw
        if self.command.keep is not None and (path := self._path()):
            text, rest = self.command.keep(data)
            if file is None:
                print(text, end="", flush=True)
                return
            file.commit(text)
            data = {**rest, "keptIn": path}
            raw = {"status": 0, "message": "", "data": data}
        if self.as_json:
            _print_json(raw)
        else:
            _show_or_print(lambda: self.command.show(data), raw)

    def _unknown(self, why: str) -> Exit:
        return _fail(Exit.UNKNOWN, f"{why}. Outcome unknown: check before you repeat it, with\n  {self.look()}")

    def look(self) -> str:
        """Return the command line that shows the outcome of a change."""
        return self.command.look_with(self.metaserver, self.values, program=program())

    def _examine(self) -> Exit:
        def ask(action: str) -> Answer:
            arguments = {"action": action, **({"details": "true"} if action == "ListBrokers" else {})}
            return post(self.metaserver, self.token, arguments, timeout_s=self.command.wait_s({}))

        findings = list(examine(self.metaserver, ask, self.token, transitions=bool(self.values["transitions"])))
        shown = [finding.json() for finding in findings]
        if self.as_json:
            _print_json(shown)
        else:
            show(self.command.show([{name: as_typed(text) for name, text in row.items()} for row in shown]))
        return Exit.REFUSED if worst(findings) is Level.FAIL else Exit.DONE

    def _path(self) -> str:
        """Return the file to write, or an empty text."""
        return next((self.values[option.name] for option in self.command.options if option.kind is Kind.PATH), "")

    def _shown(self, arguments: Mapping[str, str]) -> dict[str, str]:
        """Return the arguments with secrets hidden, for display."""
        secret = {option.parameter for option in self.command.options if option.kind is Kind.SECRET}
        return {name: "…" if name in secret else value for name, value in arguments.items()}


def _values(command: Command, options: argparse.Namespace) -> dict[str, str]:
    """Read the inputs that are not typed: secrets and contents of files."""
    values: dict[str, str] = dict(options.values)
    paths = {option.name: getattr(options, f"option_{option.name}_file", None) for option in command.options}
    kinds = Kind.FILE, Kind.LINES, Kind.BODY
    files = [values[option.name].removeprefix(FILE_MARK) for option in command.options if option.kind in kinds]
    if [options.token_file, *paths.values(), *files].count(STANDARD_STREAM) > 1:
        raise NoInput("standard input can give one thing only; put the other into a file")
    for option in command.options:
        if option.kind is Kind.SECRET:
            typed, path = values[option.name] or None, paths[option.name]
            if typed is None and path is None and option.unless(values):
                continue
            values[option.name] = read_password(option.name, typed, path)
        elif option.kind is Kind.FILE:
            values[option.name] = read_document(values[option.name])
    return values


def _show_or_print(blocks: Callable[[], Iterable[Block]], raw: Any) -> None:
    """Show the answer. A metaserver of another version may format it differently; then print the raw answer."""
    try:
        show(blocks())
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        complain(f"the answer has the format of another version ({type(error).__name__}: {error}); the raw answer:")
        _print_json(raw)


def _is_plan(data: Any) -> bool:
    return isinstance(data, Mapping) and "dryRun" in data


def _fail(exit_status: Exit, text: str) -> Exit:
    complain(text)
    return exit_status


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)


_TIMES = ("updateTime", "created", "expires", "revoked")
"""Fields in milliseconds since 1970; 0: never."""
_NOT_SHOWN = ("action", "dryRun", "details")
NAMES_MAX = 12
"""Number of subject and group names shown; the count is always complete."""


def refusal(preview: Any) -> str:
    """Return the reason to refuse a change, or an empty text."""
    return "; ".join(preview.get("reasons") or ()) if isinstance(preview, Mapping) else ""


def show_plan(command: Command, arguments: Mapping[str, str], preview: Any) -> Iterable[Block]:
    """Yield the changes of a plan and the subjects, groups and clients that they affect."""
    given = " ".join(f"{name}={_short(value)}" for name, value in arguments.items() if name not in _NOT_SHOWN)
    yield f"{command.name} {given}"
    if not isinstance(preview, Mapping):
        return
    for objection in preview.get("objections") or ():
        if objection not in (preview.get("reasons") or ()):  # forced: carried out despite the objection
            yield warning(f"objection: {objection}")
    yield from _reach(preview)
    yield from _changes(preview.get("before"), preview.get("after"))
    if refusal(preview):
        yield bad("it would be refused")
    elif not preview.get("wouldChange", True) and preview.get("before") == preview.get("after"):
        yield good("nothing would change")


def _reach(preview: Mapping[str, Any]) -> Iterable[Block]:
    if preview.get("clients") or any((preview.get(kind) or {}).get("count") for kind in ("subjects", "groups")):
        yield f"affects {preview['blastRadius']}"
    for kind in ("subjects", "groups"):
        names = (preview.get(kind) or {}).get("names") or []
        if names:
            more = preview[kind]["count"] - len(names[:NAMES_MAX])
            yield f"  {kind}: {', '.join(names[:NAMES_MAX])}{f' and {more:,} more' if more else ''}"


def _changes(before: Any, after: Any) -> Iterable[Block]:
    """Yield the differences field by field."""
    rows = [
        {
            "field": difference.path,
            "before": _cell(difference.path, difference.before),
            "after": _cell(difference.path, difference.after),
        }
        for difference in differences(before, after)
    ]
    if rows:
        yield Table(
            (
                Column("CHANGES", "field"),
                Column("FROM", "before", fold=16),
                Column("TO", "after", fold=16),
            ),
            rows,
        )


def _cell(path: str, value: Any) -> Cell | None:
    if value is None:
        return None
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return Cell("; ".join(to_cell(item).text for item in value))
    last = path.rpartition(".")[2]
    return to_cell(utc(value) if last in _TIMES and isinstance(value, int) else value)


def _short(value: str) -> str:
    return value if len(value) <= 60 else f"({len(value):,} characters)"
