"""Core. All commands of the tools, in the order of the help."""

from __future__ import annotations

from collections.abc import Mapping

from qmq.tools.command import Command
from qmq.tools.commands.audit import AUDIT
from qmq.tools.commands.brokers import BROKERS
from qmq.tools.commands.consumers import CONSUMERS
from qmq.tools.commands.installation import DATABASES, INSTALLATION, OUTBOX, TOKENS, UPKEEP
from qmq.tools.commands.messages import DELAYS, MESSAGES
from qmq.tools.commands.routes import GROUPS, ROUTES

SECTIONS: Mapping[str, tuple[Command, ...]] = {
    "brokers and broker groups": BROKERS,
    "producers and broker groups": GROUPS,
    "subjects and their routes": ROUTES,
    "consumers and clients": CONSUMERS,
    "messages": MESSAGES,
    "delayed messages": DELAYS,
    "databases of applications": DATABASES,
    "outboxes": OUTBOX,
    "tokens": TOKENS,
    "metadata and its history": UPKEEP,
    "the nightly audit": AUDIT,
    "the installation": INSTALLATION,
}

COMMANDS: Mapping[str, Command] = {command.name: command for section in SECTIONS.values() for command in section}
"""Command by name."""
