"""Shell. `qmq dashboards --out DIR`: one JSON file per page, for Grafana's import or provisioning."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from qmq.deploy.dashboards.pages import PAGES, to_json
from qmq.deploy.plan import write_atomically


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="qmq dashboards", description="Write Grafana's pages.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    options = parser.parse_args(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        for page in PAGES:
            path = options.out / f"{page.uid}.json"
            write_atomically(path, json.dumps(to_json(page), indent=2) + "\n", mode=0o644)
            print(path)
    except OSError as error:
        print(f"qmq dashboards: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
