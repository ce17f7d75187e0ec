"""Core. The configuration of nginx, where it has to agree with the metaserver."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qmq.deploy.nginx import nginx_conf
from qmq.metaserver.actions import ACTIONS
from qmq.metaserver.http.endpoints import GRACE_MS

CONFIGURATION = Path("deploy/nginx.conf").read_text()


def test_nginx_waits_longer_than_any_action_takes():
    """Otherwise it answers 504 in place of the metaserver, and the outcome is unknown."""
    waits = ((action.wait_ms, action.parameter("waitMs")) for action in ACTIONS.values())
    longest_ms = max(wait_ms + (asked.most if asked else 0) for wait_ms, asked in waits) + GRACE_MS
    [seconds] = re.findall(r"location / \{[^}]*proxy_read_timeout (\d+)s;", CONFIGURATION)
    assert int(seconds) * 1000 > longest_ms


def test_nginx_takes_names_and_ipv6():
    text = nginx_conf(["8080", "[::]:8080"], ["mq1:8080", "[FD00::2]:8080"])
    assert "    listen 8080;\n    listen [::]:8080;\n" in text
    assert "    server mq1:8080 max_fails" in text and "    server [fd00::2]:8080 max_fails" in text
    with pytest.raises(ValueError, match=r"use such as mq1:8080 or \[fd00::2\]:8080"):
        nginx_conf("8080", ["fd00::2:8080"])
