"""Shell. Configuration of nginx in front of the metaservers, from the template `deploy/nginx.conf`.

qmq nginx --metaserver 10.0.0.1:8080 --metaserver 10.0.0.2:8080 > /etc/nginx/conf.d/qmq.conf
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from qmq.errors import QmqError
from qmq.types import Endpoint

TEMPLATE = Path(__file__).with_name("nginx.conf")


def nginx_conf(listen: str | Iterable[str], metaservers: Iterable[str]) -> str:
    """Return the configuration.

    Args:
        listen: nginx' port, or address:port; several for IPv4 and IPv6.
        metaservers: HTTP address:port of each.

    Raises:
        QmqError, ValueError: an address is invalid.
    """
    addresses = [str(Endpoint.parse(address)) for address in metaservers]
    if not addresses:
        raise QmqError("name at least one metaserver, better two: --metaserver HOST:PORT")
    listens = [listen] if isinstance(listen, str) else list(listen)
    for place in listens:
        Endpoint.parse(place if ":" in place else f"any:{place}")
    servers = "\n".join(f"    server {address} max_fails=1 fail_timeout=2s;" for address in addresses)
    return (
        TEMPLATE.read_text()
        .replace("{{servers}}", servers)
        .replace("{{listens}}", "\n".join(f"    listen {place};" for place in listens))
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="qmq nginx", description="Print nginx' configuration for the metaservers.")
    parser.add_argument(
        "--listen", action="append", help="port, or address:port; repeat it for IPv6, as in [::]:8080; default: 8080"
    )
    parser.add_argument("--metaserver", action="append", default=[], help="HTTP address:port of one; repeat it")
    options = parser.parse_args(arguments)
    try:
        print(nginx_conf(options.listen or "8080", options.metaserver), end="")
    except (QmqError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
