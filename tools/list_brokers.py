"""Core. ListBrokers: who may be a broker, with which part."""

from __future__ import annotations

from typing import Any

from tools.command import Command, Option
from tools.table import render_table


def render(brokers: Any) -> str:
    head = ("GROUP", "ROLE", "HOSTNAME", "IP", "SERVE", "SYNC", "CONTROL", "METRICS", "UP")
    fields = ("group", "role", "hostname", "ip", "servePort", "syncPort", "controlPort", "metricsPort", "up")
    return render_table(head, [[broker[name] for name in fields] for broker in brokers])


COMMAND = Command(
    name="ListBrokers",
    help="list brokers: their parts and addresses, and whether they are up",
    action="ListBrokers",
    options=(Option("brokerGroup", "only this broker group", default=""),),
    render=render,
    changes=False,
)
