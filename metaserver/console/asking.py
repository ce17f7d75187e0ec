"""Shell. The questions of one page: operators' actions, asked with the rights of who looks at it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from qmq.metaserver.actions import ACTIONS, Answer, Status
from qmq.metaserver.console.nights import Nights
from qmq.metaserver.console.rates import Looks
from qmq.metaserver.http.management import ANYBODY
from qmq.metaserver.http.running import ActionsPort, run_within
from qmq.rights import Caller

LOG_IN = "LogIn"


class Asking:
    """Made for one request.

    Args:
        caller: who is logged in; None: nobody.
        open_lists: what QMQ lists without a token is shown without one, as the tools get it.
        looks: what is kept of subjects that somebody looks at.
        nights: the audit's ledger; None: nobody said where it is.
    """

    def __init__(
        self,
        actions: ActionsPort,
        caller: Caller | None,
        looks: Looks,
        *,
        open_lists: bool,
        nights: Nights | None = None,
    ) -> None:
        self._actions, self.caller, self._open_lists = actions, caller, open_lists
        self.looks, self.nights = looks, nights

    async def ask(self, name: str, words: Mapping[str, Any] | None = None) -> Answer:
        """Run an action; empty words are left out. Nobody logged in: an answer that says so."""
        action, caller = ACTIONS[name], self.caller
        if caller is None and self._open_lists and not action.needs_token:
            caller = ANYBODY
        if caller is None:
            return Answer(Status.REFUSED, "log in to see this", code=LOG_IN)
        given = {word: str(value) for word, value in (words or {}).items() if value not in ("", None)}
        return await run_within(self._actions, action, given, caller)

    async def ask_for(self, seconds: float, name: str, words: Mapping[str, Any] | None = None) -> Answer:
        """As `ask`; a look that takes longer is given up, for its place on the page is not worth more."""
        try:
            async with asyncio.timeout(seconds):
                return await self.ask(name, words)
        except TimeoutError:
            return Answer(Status.WAIT, f"{name} takes longer than {seconds:g} s; ask for less, or on its own page")
