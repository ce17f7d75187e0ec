"""Shell. Times of the console's pages with many subjects and groups, without brokers."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

from benchmarks.metaserver_load import HOT, group_name, subject_name
from qmq.errors import QmqError
from qmq.ledger import PROVEN, SUFFIX, Entry, encode_entry

TIMES = 20
PAGES = {
    "overview": "/console",
    "overview_last": "/console?page=19",
    "overview_readonly": "/console?state=readonly",
    "overview_name": f"/console?name={group_name(7)}",
    "group": f"/console/group?name={group_name(7)}",
    "subjects": "/console/subjects",
    "subjects_prefix": f"/console/subjects?prefix={subject_name(1)}",
    "subjects_later": f"/console/subjects?after={subject_name(50_000)}",
    "subjects_of_group": f"/console/subjects?group={group_name(7)}",
    "consumers": "/console/consumers",
    "consumers_subject": f"/console/consumers?subject={HOT}",
    "messages": f"/console/messages?subject={HOT}",
    "delayed": "/console/delayed",
    "outbox": "/console/outbox",
    "trail": "/console/trail",
    "audit": "/console/audit",
    "change": "/console/change?action=DrainGroup",
}


NIGHTS = 30


def fill_ledger(folder: Path, groups: int) -> None:
    """Write a month of nights of every broker group."""
    folder.mkdir()
    for group in map(group_name, range(groups)):
        read = {"master": 1 << 30, "slave": 1 << 30}
        nights = [
            Entry(f"night {night}", 1_790_000_000_000 + 86_400_000 * night, group, PROVEN, verified=4096, read=read)
            for night in range(NIGHTS)
        ]
        (folder / f"{group}{SUFFIX}").write_bytes(b"".join(map(encode_entry, nights)))


def measure(port: int, token: str, note: Callable[[str, float, str], None]) -> None:
    """Log in and request each page; record the median and the maximum time, in milliseconds."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    cookie = _log_in(connection, token)
    for name, address in PAGES.items():
        times = sorted(_take(connection, cookie, address) for _ in range(TIMES))
        note(f"console_{name}_p50_ms", times[TIMES // 2] * 1000, "from the request to the last byte of the page")
        note(f"console_{name}_max_ms", times[-1] * 1000, f"the slowest of {TIMES}")
    connection.close()


def _log_in(connection: http.client.HTTPConnection, token: str) -> str:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    connection.request("POST", "/console/login", urlencode({"token": token, "next": ""}), headers)
    answer = connection.getresponse()
    answer.read()
    if answer.status != 303:
        raise QmqError(f"the console rejects the login: {answer.status}")
    return (answer.getheader("Set-Cookie") or "").partition(";")[0]


def _take(connection: http.client.HTTPConnection, cookie: str, address: str) -> float:
    began = time.monotonic()
    connection.request("GET", address, headers={"Cookie": cookie})
    answer = connection.getresponse()
    page = answer.read()
    if answer.status != 200 or not page.rstrip().endswith(b"</html>"):
        raise QmqError(f"{address}: {answer.status} {page[:300].decode('utf-8', 'replace')}")
    return time.monotonic() - began
