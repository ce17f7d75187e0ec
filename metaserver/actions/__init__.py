"""Operators' actions."""

from qmq.metaserver.actions.action import Action, Answer, Kind, Parameter, Status, Style
from qmq.metaserver.actions.catalog import ACTIONS

__all__ = ["ACTIONS", "Action", "Answer", "Kind", "Parameter", "Status", "Style"]
