"""Shell. Type completeness of the client, from `pyright --verifytypes qmq --outputjson` on standard input.

pyright counts each module that an application could import. The packages of servers are left out here.
"""

from __future__ import annotations

import json
import sys

SERVERS = frozenset(
    "audit broker delayserver deploy gateway log metaserver proto replication server tools watchdog".split()
)
LEAST = 0.98


def main() -> int:
    symbols = json.load(sys.stdin)["typeCompleteness"]["symbols"]
    exported = [symbol for symbol in symbols if symbol["isExported"]]
    client = [symbol for symbol in exported if symbol["name"].split(".")[1] not in SERVERS]
    unknown = sorted(symbol["name"] for symbol in client if not symbol["isTypeKnown"])
    score = 1 - len(unknown) / len(client)
    print(*unknown, f"{score:.1%} of {len(client)} symbols are known; {LEAST:.0%} are required", sep="\n")
    return int(score < LEAST)


if __name__ == "__main__":
    sys.exit(main())
