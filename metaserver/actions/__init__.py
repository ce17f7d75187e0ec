"""Operators' actions."""

from qmq.commands.action import Action, Kind, Parameter, Status, Style
from qmq.commands.catalog import ACTIONS
from qmq.metaserver.actions.answer import Answer

__all__ = ["ACTIONS", "Action", "Answer", "Kind", "Parameter", "Status", "Style"]
