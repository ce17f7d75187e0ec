"""Core. The table of all commands, in the order in which people look for them."""

from __future__ import annotations

from collections.abc import Mapping

from tools.command import Command
from tools.commands.access import DATABASES, TOKENS, UPKEEP
from tools.commands.brokers import BROKERS
from tools.commands.consumers import CONSUMERS
from tools.commands.delays import DELAYS
from tools.commands.installation import INSTALLATION
from tools.commands.messages import MESSAGES
from tools.commands.outbox import OUTBOX
from tools.commands.routes import GROUPS, ROUTES

SECTIONS: Mapping[str, tuple[Command, ...]] = {
    "brokers and broker groups": BROKERS,
    "producers and broker groups": GROUPS,
    "subjects and their routes": ROUTES,
    "consumers and clients": CONSUMERS,
    "messages": MESSAGES,
    "delayed messages": DELAYS,
    "databases of businesses": DATABASES,
    "outboxes": OUTBOX,
    "tokens": TOKENS,
    "metadata and its history": UPKEEP,
    "the installation": INSTALLATION,
}

COMMANDS: Mapping[str, Command] = {command.name: command for section in SECTIONS.values() for command in section}
"""Command by its name."""
