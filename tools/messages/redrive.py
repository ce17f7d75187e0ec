"""Shell. Redrive: returns dead letters to their consumer group, or sends them to another subject.

All dead letters of the group are read in order. Chosen ones move back one batch at a time: stored first, removed from
the dead letters second. An interruption loses none; the batch under way may go back twice, with the same ids. All
others stay dead letters.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext

from qmq.errors import AccessError, CallError, OutcomeUnknown, Overloaded, QmqError
from qmq.proto import qmq_pb2 as pb
from qmq.redrive.dead_letters import DeadLetters, Destination, Master
from qmq.redrive.redriving import Choice, Chosen, Receipt, batches_of, others_of
from qmq.remoting.commands import Produced
from qmq.subjects import dead_letter_subject
from qmq.tools.call import Exit
from qmq.tools.command import bad, good, warning
from qmq.tools.files import PrivateFile
from qmq.tools.messages.brokers import Looker, Unanswered, looking, masters_of_route, run_on_loop
from qmq.tools.messages.lines import to_json, words_of
from qmq.tools.session import Session
from qmq.tools.table import Block, Column, Table
from qmq.tools.terminal import ask, complain, is_yes, show

OTHERS_MAX = 50_000
"""Limit for dead letters that are not chosen and stay unacked until the end; beyond it, the first ones are skipped. A
broker delivers at most 200,000 unacked messages to one consumer.
"""
CHOSEN_MAX = 100_000
CHOSEN_BYTES_MAX = 256 << 20
BATCH_MESSAGES_MAX = 500
OVERLOADED_S, OVERLOADED_TRIES = 0.5, 20
_BEHIND_ALL = 1 << 62
SHOWN_MAX = 50
"""Number of ids displayed; `--json` and the receipt have all."""

Bounds = tuple[int, int]
"""Sequences of dead letters, `[begin, end)`."""


def run(session: Session) -> Exit:
    try:
        return run_on_loop(session, lambda opened: _Redrive(opened).run())
    except KeyboardInterrupt:
        complain("interrupted before anything was moved")
        return Exit.REFUSED


class _Redrive:
    """One run of the command."""

    def __init__(self, session: Session) -> None:
        values = self._values = session.values
        self._session = session
        self._source = values["from"]
        self._dead = self._source or dead_letter_subject(values["subject"], values["group"])
        self._choice = Choice(
            values["id"],
            json.loads(values["property"] or "{}"),
            frozenset(words_of(values["tag"])),
            values["reason"],
            (values["subject"], values["group"]) if self._source else None,
        )
        self._rate = int(values["rate"])
        self._left_to_choose = int(values["limit"] or 0) or CHOSEN_MAX
        self._chosen: list[tuple[DeadLetters, list[Chosen]]] = []
        self._chosen_bytes = 0
        self._receipt = Receipt(values["subject"], values["group"], values["to"])
        self._why_left = "not reached"

    async def run(self) -> Exit:
        async with AsyncExitStack() as stack:
            for source, bounds in await self._sources(stack):
                self._chosen.append((source, await self._take(source, bounds)))
            if (ended := await self._plan()) is not None:
                return ended
            path = self._values["out"]
            with PrivateFile(path) if path else nullcontext() as file:
                try:
                    await self._move_all()
                except asyncio.CancelledError:
                    _go_on_after_interrupt()
                    self._why_left = "interrupted"
                try:
                    self._finish(file)
                except BrokenPipeError:  # the reader of the output is gone
                    raise
                except OSError as error:
                    if not self._receipt.moved and not self._receipt.unknown:
                        raise
                    complain(f"the receipt could not be written: {error}. Look with\n  {self._session.look()}")
                    return Exit.UNKNOWN
        return self._exit()

    # Dead letters that exist.

    async def _sources(self, stack: AsyncExitStack) -> list[tuple[DeadLetters, Bounds]]:
        """Subscribe to the dead letters of each broker group that has any."""
        sources = []
        async with looking(self._session, self._dead) as lookers:
            found = await asyncio.gather(*(self._bounds(looker) for looker in lookers))
        destinations = await self._destinations()
        for looker, bounds in zip(lookers, found):
            try:
                if isinstance(bounds, Unanswered):
                    raise bounds
                if bounds[0] < bounds[1]:
                    source = await self._open(looker.master, destinations)
                    stack.push_async_callback(source.close)
                    sources.append((source, bounds))
            except Unanswered as why:
                if why.exit is Exit.REFUSED:
                    raise
                self._receipt.unasked[looker.broker_group] = str(why)
        return sources

    async def _destinations(self) -> list[Master]:
        """Return the masters of the destination subject; none if the messages go back."""
        if not (to := self._values["to"]):
            return []
        if masters := await masters_of_route(self._session, to, writes=True):
            return masters
        raise Unanswered(Exit.UNREACHABLE, f"no broker group of {to} has a master")

    async def _open(self, master: Master, destinations: Sequence[Master]) -> DeadLetters:
        values = self._values
        to = Destination.of(values["to"], destinations, master.broker_group) if destinations else None
        try:
            return await DeadLetters.open(
                master, self._session.token, values["subject"], values["group"], to, self._source
            )
        except QmqError as error:
            raise _unanswered(master.broker_group, error) from None

    async def _bounds(self, looker: Looker) -> Bounds | Unanswered:
        """Return the current dead letters in the requested time range."""
        since, until = (int(self._values[name] or 0) for name in ("since", "until"))
        try:
            answer = await looker.ask(pb.BrowseRequest(begin=_BEHIND_ALL))
            begin, end = answer.first_sequence, answer.end_sequence
            if since:
                first = await looker.ask(pb.BrowseRequest(since_ms=since, end=end, messages_max=1))
                begin = first.messages[0].sequence if first.messages else end
            if until:
                last = await looker.ask(pb.BrowseRequest(until_ms=until, end=end, newest_first=True, messages_max=1))
                end = last.messages[0].sequence + 1 if last.messages else begin
        except Unanswered as why:
            return why
        return begin, end

    async def _take(self, source: DeadLetters, bounds: Bounds) -> list[Chosen]:
        """Read dead letters to their end, or until enough are chosen."""
        chosen: list[Chosen] = []
        others: list[tuple[int, int]] = []
        try:
            while self._left_to_choose and self._chosen_bytes < CHOSEN_BYTES_MAX:
                if not (pieces := await source.take()):
                    break
                more = list(self._choice.of(source.broker_group, pieces, bounds))[: self._left_to_choose]
                others += others_of(pieces, more)
                if sum(end - begin for begin, end in others) > OTHERS_MAX:
                    await source.pass_over(others)
                    others = []
                self._receipt.looked_at += sum(piece.count for piece in pieces)
                self._left_to_choose -= len(more)
                self._chosen_bytes += sum(len(letter.data) for letter in more)
                chosen += more
        except QmqError as error:
            raise _unanswered(source.broker_group, error) from None
        return chosen

    # Plan.

    async def _plan(self) -> Exit | None:
        """Show the plan and confirm it; return the exit status if the command ends here, else None."""
        session = self._session
        chosen = [letter for _, letters in self._chosen for letter in letters]
        if session.dry_run:
            plan = self._receipt.json() | {"dryRun": True, "chosen": [letter.json() for letter in chosen]}
            print(to_json(plan)) if session.as_json else show(self._planned(chosen))
            return Exit.UNREACHABLE if self._receipt.unasked else Exit.DONE
        show(self._planned(chosen), sys.stderr)
        if not chosen or session.yes:
            return None
        ask("Do it?")
        if not is_yes(await _typed_line()):
            complain("not confirmed; nothing was moved")
            return Exit.REFUSED
        return None

    def _planned(self, chosen: Sequence[Chosen]) -> list[Block]:
        count, group, goes_to = len(chosen), self._values["group"], self._receipt.goes_to
        blocks: list[Block] = [
            f"{self._receipt.looked_at:,} dead letters of {group} looked at; {count:,} of them go {goes_to}"
        ]
        if chosen:
            rows = [letter.json() for letter in chosen[:SHOWN_MAX]]
            blocks.append(Table(_LETTER, rows))
            blocks += [f"and {count - SHOWN_MAX:,} more"] if count > SHOWN_MAX else []
        return blocks + self._warnings()

    def _warnings(self) -> list[Block]:
        return [warning(f"not looked at: {name}, {why}") for name, why in self._receipt.unasked.items()]

    # Moves.

    async def _move_all(self) -> None:
        pace = _Pace(self._rate)
        for source, letters in self._chosen:
            most = max(min(BATCH_MESSAGES_MAX, self._rate // 5), 1)
            for batch in batches_of(letters, messages_max=most, bytes_max=source.batch_bytes_max):
                await pace.wait(len(batch))
                if not await self._move(source, batch):
                    break  # other broker groups may work

    async def _move(self, source: DeadLetters, batch: Sequence[Chosen]) -> bool:
        """Move one batch; return whether to try the next one."""
        receipt = self._receipt
        rows = [letter.json() for letter in batch]
        try:
            produced = await _send_back(source, batch)
            refused = dict(produced.refused)
            receipt.left += [letter.json(why=refused[at]) for at, letter in enumerate(batch) if at in refused]
            stored = [letter for at, letter in enumerate(batch) if at not in refused]
            rows = [letter.json(newSequence=produced.first_sequence + at) for at, letter in enumerate(stored)]
            if stored:
                await _settle(source, stored)
        except OutcomeUnknown as error:
            receipt.unknown += rows
            self._why_left = str(error)
            return False
        except asyncio.CancelledError:
            receipt.unknown += rows
            raise
        except QmqError as error:
            self._why_left = str(error)
            return False
        receipt.moved += rows
        return True

    # Outcome.

    def _finish(self, file: PrivateFile | None) -> None:
        """Write and show the receipt."""
        receipt = self._receipt
        listed = {(row["brokerGroup"], row["sequence"]) for row in (*receipt.moved, *receipt.unknown, *receipt.left)}
        chosen = [letter for _, letters in self._chosen for letter in letters]
        receipt.left += [
            letter.json(why=self._why_left) for letter in chosen if (letter.broker_group, letter.sequence) not in listed
        ]
        if file is not None:
            file.commit(json.dumps(receipt.json(), ensure_ascii=False, indent=1) + "\n")
        if self._session.as_json:
            print(to_json(receipt.json()))
        else:
            show(self._shown())

    def _shown(self) -> list[Block]:
        receipt, out = self._receipt, self._values["out"]
        text = f"{len(receipt.moved):,} dead letters went {receipt.goes_to}"
        blocks: list[Block] = [good(text) if receipt.moved else text]
        if receipt.moved:
            blocks.append(Table((*_LETTER[:3], Column("NEW SEQUENCE", "newSequence")), receipt.moved[:SHOWN_MAX]))
        if len(receipt.moved) > SHOWN_MAX:
            blocks.append(f"and {len(receipt.moved) - SHOWN_MAX:,} more{f': see {out}' if out else ''}")
        unknown = f"may have gone {receipt.goes_to}"
        for rows, outcome in ((receipt.unknown, unknown), (receipt.left, "stayed dead letters")):
            if rows:
                blocks.append(bad(f"{len(rows):,} {outcome}: {rows[0].get('why') or self._why_left}"))
        return blocks + self._warnings()

    def _exit(self) -> Exit:
        receipt = self._receipt
        if receipt.unknown or (receipt.moved and (receipt.left or receipt.unasked)):
            complain(
                "Some dead letters are left. Run it again for them; messages of unknown outcome may go back twice. "
                "Check with\n  "
                f"{self._session.look()}"
            )
            return Exit.UNKNOWN
        if receipt.unasked:
            return Exit.UNREACHABLE
        return Exit.REFUSED if receipt.left else Exit.DONE


_LETTER = (
    Column("BROKER GROUP", "brokerGroup", drop=1),
    Column("SEQUENCE", "sequence"),
    Column("ID", "id", fold=12),
    Column("TIMES", "times", drop=2),
    Column("REASON", "deadReason", fold=20),
)


class _Pace:
    """Limits messages per second."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._messages = 0
        self._began_s = asyncio.get_running_loop().time()

    async def wait(self, messages: int) -> None:
        """Wait until this many more messages may be sent."""
        due_s = self._began_s + self._messages / self._rate
        self._messages += messages
        await asyncio.sleep(max(due_s - asyncio.get_running_loop().time(), 0))


async def _send_back(source: DeadLetters, batch: Sequence[Chosen]) -> Produced:
    """Repeat the call after a pause if the broker is busy."""
    for _ in range(OVERLOADED_TRIES):
        try:
            return await source.send_back(batch)
        except Overloaded:
            await asyncio.sleep(OVERLOADED_S)
    return await source.send_back(batch)


async def _settle(source: DeadLetters, stored: Sequence[Chosen]) -> None:
    try:
        await source.settle(stored)
    except QmqError as error:
        raise OutcomeUnknown(f"they were sent, but may be dead letters still: {error}") from None


def _unanswered(broker_group: str, error: QmqError) -> Unanswered:
    is_refusal = isinstance(error, AccessError | CallError)
    return Unanswered(Exit.REFUSED if is_refusal else Exit.UNREACHABLE, f"{broker_group}: {error}")


async def _typed_line() -> str:
    """Read a typed line on the event loop: a thread that waits for a line would outlive an interrupt."""
    loop, typed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), typed.set)
    try:
        await typed.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
    return sys.stdin.readline()


def _go_on_after_interrupt() -> None:
    """Clear the interrupt, so that the receipt is still written and shown."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
