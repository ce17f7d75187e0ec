"""Shell. `qmq chaos`: faults at random on a cluster with your settings, for as long as you like, and a verdict.

Exit status 0: every promise was kept; 1: findings, printed, and what all processes wrote is kept; 2: it cannot run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import shutil
import signal
import sys
import threading
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from qmq.deploy.chaos import sandbox, timeline
from qmq.deploy.chaos.nemesis import STRIKES, Nemesis, possible
from qmq.deploy.chaos.trial import Outcome, attempt
from qmq.errors import NotServed, QmqError

ROUND_S = 120.0
"""A new cluster after so long: comparing whole logs at the end bounds how much one trial may write."""
MARK = "qmq-chaos"
"""A file by which the folder of a run is known: such a folder may be emptied."""
OF_ONE_BROKER = frozenset(
    {"hostname", "ip", "serve_port", "sync_port", "control_port", "metrics_port", "data", "metaserver", "token"}
)
"""Settings that say which broker a file is for; here they are chosen."""


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    sandbox.enter("qmq.deploy.chaos.main", arguments)
    if options.list:
        return _list()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        only, settings = _faults(options.faults), _settings(options.settings)
        return _run(options, only, settings)
    except (QmqError, OSError) as error:
        print(f"qmq chaos: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qmq chaos", description="Faults at random on a cluster, and a verdict.")
    parser.add_argument("--minutes", type=_minutes, default=10.0, help="default: 10")
    parser.add_argument("--seed", type=int, default=1, help="first seed; each trial has the next one; default: 1")
    parser.add_argument("--faults", help="only these, separated by commas; default: all that this machine can make")
    parser.add_argument("--settings", type=Path, help="a broker's settings file, whose settings all brokers get")
    parser.add_argument("--dir", type=Path, default=Path(".run/chaos"), help="made anew; default: .run/chaos")
    parser.add_argument("--list", action="store_true", help="say which faults there are, and what is missing for them")
    return parser


def _minutes(text: str) -> float:
    with suppress(ValueError):
        if (minutes := float(text)) > 0:  # "nan", with which a run would never end, is not
            return minutes
    raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")


def _list() -> int:
    for name, strike in STRIKES.items():
        print(f"{name:34}{strike.missing()}".rstrip())
    return 0


def _faults(asked: str | None) -> list[str]:
    """Return the names of the faults to choose from; raises NotServed: one is unknown, or cannot be made here."""
    if asked is None:
        return possible()
    names = [name.strip() for name in asked.split(",")]
    for name in names:
        if name not in STRIKES:
            raise NotServed(f"there is no fault {name!r}; --list names all of them")
        if missing := STRIKES[name].missing():
            raise NotServed(f"{name}: {missing}")
    return names


def _settings(path: Path | None) -> Mapping[str, Any]:
    """Return what a file says for all brokers, who check it; raises NotServed: it is no TOML."""
    if path is None:
        return {}
    try:
        written = tomllib.loads(path.read_text())
    except ValueError as error:
        raise NotServed(f"{path}: {error}") from error
    return {name: value for name, value in written.items() if name not in OF_ONE_BROKER}


def _run(options: argparse.Namespace, only: list[str], settings: Mapping[str, Any]) -> int:
    for name in sorted(STRIKES.keys() - set(only)) if options.faults is None else ():
        _say(f"without {name}: {STRIKES[name].missing()}")
    _make_anew(options.dir)
    logging.basicConfig(filename=options.dir / "clients.log", format="%(asctime)s %(levelname)s %(message)s")
    left_s, seed = options.minutes * 60, options.seed
    while True:
        folder, round_s = options.dir / f"seed-{seed}", min(ROUND_S, left_s)
        folder.mkdir()
        strike = partial(_strike, round_s, random.Random(seed), only)
        outcome = asyncio.run(attempt(folder, seed=seed, strike=strike, settings=settings, say=_say))
        _report(folder, outcome, seed)
        if outcome.findings:
            print(f"what all processes wrote is kept in {folder}")
            return 1
        shutil.rmtree(folder / "cluster")
        left_s, seed = left_s - round_s, seed + 1
        if left_s <= 0:
            return 0


def _make_anew(folder: Path) -> None:
    """Empty the folder of an earlier run; raises NotServed: it is none."""
    if folder.exists():
        if any(folder.iterdir()) and not (folder / MARK).exists():
            raise NotServed(f"{folder} is not empty, and is no folder of `qmq chaos`: --dir names another")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()


def _strike(seconds: float, rng: random.Random, only: list[str], nemesis: Nemesis, stop: threading.Event) -> None:
    nemesis.strike_within(seconds, rng, only)


def _report(folder: Path, outcome: Outcome, seed: int) -> None:
    said = f"seed {seed}: {outcome.summary()}"
    print(said)
    for finding in outcome.findings:
        print(f"{finding.rule}: {finding.text}")
    (folder / "report.html").write_text(timeline.page(outcome.history, outcome.findings, said))
    verdict = {"seed": seed, "findings": [one._asdict() for one in outcome.findings], **asdict(outcome.history)}
    (folder / "verdict.json").write_text(json.dumps(verdict) + "\n")
    print(f"picture and record: {folder / 'report.html'}, {folder / 'verdict.json'}", flush=True)


def _say(line: str) -> None:
    print(f"  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
