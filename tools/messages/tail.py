"""Shell. Tail: shows what is stored from now on, and follows every broker group wherever its master goes.

It asks brokers again and again what is new. So there is no consumer group that stays behind, and nobody who consumes
notices anything.
"""

from __future__ import annotations

import asyncio
import time
from heapq import merge
from typing import Any

from qmq.proto import qmq_pb2 as pb
from qmq.tools.answer import Exit
from qmq.tools.messages.brokers import Looker, Unanswered, ended, find_masters, looking
from qmq.tools.messages.browse import browsed_json, subject_of, wanted
from qmq.tools.messages.shown import line_of
from qmq.tools.session import Session
from qmq.tools.terminal import complain

PAUSE_S = 0.3
SEEK_S = 10.0
"""How often broker groups are looked for that came later."""
LAST_MAX = 1_000
_BEHIND_ALL = 1 << 62


def run(session: Session) -> Exit:
    try:
        return ended(session, _tail)
    except KeyboardInterrupt:
        return Exit.DONE


async def _tail(session: Session) -> Exit:
    async with looking(session, subject_of(session.values), session.values["brokerGroup"]) as lookers:
        await _Tail(session).show(lookers)
    return Exit.DONE


class _Tail:
    """One run: prints lines as they come, until there were enough."""

    def __init__(self, session: Session) -> None:
        self._session, self._values = session, session.values
        self._form = "json" if session.as_json else session.values["format"]
        self._left = int(session.values["limit"] or 0) or _BEHIND_ALL
        self._began_ms = time.time_ns() // 1_000_000
        self._is_full = asyncio.Event()

    async def show(self, lookers: list[Looker]) -> None:
        """Show the newest messages, then those that come. Raises Unanswered if brokers refuse."""
        ends = await self._show_last(lookers)
        tasks = [asyncio.create_task(self._follow(looker, end)) for looker, end in zip(lookers, ends)]
        tasks.append(asyncio.create_task(self._seek({looker.broker_group for looker in lookers})))
        tasks.append(asyncio.create_task(self._wait_until_full()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_until_full(self) -> None:
        await self._is_full.wait()

    def _print(self, message: dict[str, Any]) -> None:
        if self._left:
            self._left -= 1
            print(line_of(message, self._form), flush=True)
        if not self._left:
            self._is_full.set()

    async def _show_last(self, lookers: list[Looker]) -> list[int | None]:
        """Show the newest messages of all groups; return where each ends, None where no broker answers."""
        count = min(int(self._values["last"]), LAST_MAX)
        request = wanted(self._values)
        request.newest_first, request.messages_max = True, max(count, 1)
        request.begin = 0 if count else _BEHIND_ALL
        answers = await asyncio.gather(*(self._ask(looker, request) for looker in lookers))
        parts = [
            [browsed_json(looker.broker_group, message) for message in reversed(answer.messages)]
            for looker, answer in zip(lookers, answers)
            if answer is not None
        ]
        shown = list(merge(*parts, key=lambda message: int(message["stored"])))
        for message in shown[-count or len(shown) :]:
            self._print(message)
        return [answer.end_sequence if answer else None for answer in answers]

    async def _follow(self, looker: Looker, begin: int | None) -> None:
        """Print what a broker group stores from `begin` on; None: since this command began."""
        request = wanted(self._values)
        request.begin, request.since_ms = begin or 0, 0 if begin is not None else self._began_ms
        while not self._is_full.is_set():
            answer = await self._ask(looker, request)
            if answer is not None:
                for message in answer.messages:
                    self._print(browsed_json(looker.broker_group, message))
                request.begin, request.since_ms = answer.begin, 0
            if answer is None or answer.begin >= answer.end:
                await asyncio.sleep(PAUSE_S)

    async def _ask(self, looker: Looker, request: pb.BrowseRequest) -> pb.BrowseAnswer | None:
        """None: no broker answers now, which was reported."""
        try:
            return await looker.ask(request)
        except Unanswered as why:
            if why.exit is Exit.REFUSED:
                raise
            complain(f"{why}; going on when it answers")
            return None

    async def _seek(self, known: set[str]) -> None:
        """Follow broker groups, too, that are added meanwhile."""
        async with asyncio.TaskGroup() as tasks:
            while not self._values["brokerGroup"]:
                await asyncio.sleep(SEEK_S)
                try:
                    masters = await find_masters(self._session, subject_of(self._values))
                except Unanswered:
                    continue  # those that are known are followed all the same
                for master in masters:
                    if master.broker_group not in known:
                        known.add(master.broker_group)
                        looker = Looker(self._session, subject_of(self._values), master)
                        tasks.create_task(self._follow_until_the_end(looker))
            await self._is_full.wait()

    async def _follow_until_the_end(self, looker: Looker) -> None:
        try:
            await self._follow(looker, None)
        finally:
            await looker.close()
