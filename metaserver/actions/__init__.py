"""Operators' actions."""

from metaserver.actions.action import Action, Answer, Kind, Parameter, Status, Style
from metaserver.actions.catalog import ACTIONS

__all__ = ["ACTIONS", "Action", "Answer", "Kind", "Parameter", "Status", "Style"]
