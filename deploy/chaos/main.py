"""Shell. `qmq chaos`: random faults on a cluster with your settings, and a verdict.

Exit status 0: every promise was kept; 1: findings, printed, and the files of all processes are kept; 2: no run.
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
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from qmq.deploy.chaos import timeline
from qmq.deploy.chaos.clients import FAULTS, ROLE_CHANGES
from qmq.deploy.chaos.faults import STRIKES, enter_sandbox
from qmq.deploy.chaos.history import History
from qmq.deploy.chaos.records import MARKED, SLAVE_STOPPED, UNKNOWN, Sent
from qmq.deploy.chaos.trial import Load, Nemesis, Outcome, attempt, possible
from qmq.errors import NotServed, QmqError

ROUND_S = 120.0
"""Age at which a trial gets a new cluster: the comparison of whole logs at the end bounds the size of a trial."""
MARK = "qmq-chaos"
"""File that marks the folder of a run; only such a folder is emptied."""
OF_ONE_BROKER = frozenset(
    {"hostname", "ip", "serve_port", "sync_port", "control_port", "metrics_port", "data", "metaserver", "token"}
)
"""Settings of one broker's place; the run chooses them."""


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    enter_sandbox("qmq.deploy.chaos.main", arguments)
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
    parser = argparse.ArgumentParser(
        prog="qmq chaos", description="Inject random faults into a cluster, and check every promise."
    )
    parser.add_argument("--minutes", type=_minutes, default=10.0, help="default: 10")
    parser.add_argument("--seed", type=int, default=1, help="first seed; each trial has the next one; default: 1")
    parser.add_argument(
        "--messages", type=int, help="number of messages to send, with faults in a fixed order; replaces --minutes"
    )
    parser.add_argument("--rate", type=float, default=Load.rate, help=f"messages a second; default: {Load.rate:g}")
    parser.add_argument("--keys", type=int, default=Load.keys, help=f"order keys; default: {Load.keys}")
    parser.add_argument(
        "--copies",
        type=int,
        default=2,
        help="copies of each group; with more than two: swaps and kills only; default: 2",
    )
    parser.add_argument("--faults", help="faults to inject, with commas; default: all that this machine can")
    parser.add_argument("--settings", type=Path, help="a broker's settings file; all brokers get its settings")
    parser.add_argument(
        "--dir", type=Path, default=Path(".run/chaos"), help="directory of the run, emptied first; default: .run/chaos"
    )
    parser.add_argument(
        "--list", action="store_true", help="list the faults, and the tools that this machine lacks for them"
    )
    return parser


def _minutes(text: str) -> float:
    with suppress(ValueError):
        if (minutes := float(text)) > 0:  # "nan" is refused: such a run would never end
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
    """Return the settings of a file for all brokers, which check them; raises NotServed if it is not TOML."""
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
    load = Load(options.messages or 0, options.rate, options.keys)
    while True:
        folder, round_s = options.dir / f"seed-{seed}", min(ROUND_S, left_s)
        folder.mkdir()
        strike = partial(_strike, round_s, random.Random(seed), only)
        if options.messages:
            strike = partial(_strike_in_order, FAULTS if options.copies == 2 else ROLE_CHANGES)
        trial = attempt(folder, seed=seed, strike=strike, load=load, copies=options.copies, settings=settings, say=_say)
        outcome = asyncio.run(trial)
        _report(folder, outcome, seed)
        if outcome.findings:
            print(f"the files of all processes are kept in {folder}")
            return 1
        shutil.rmtree(folder / "cluster")
        left_s, seed = left_s - round_s, seed + 1
        if left_s <= 0 or options.messages:
            return 0


def _make_anew(folder: Path) -> None:
    """Empty the folder of an earlier run; raises NotServed if it is another folder."""
    if folder.exists():
        if any(folder.iterdir()) and not (folder / MARK).exists():
            raise NotServed(
                f"{folder} is not empty, and no run of `qmq chaos` made it. Name another folder with --dir."
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()


def _strike(seconds: float, rng: random.Random, only: list[str], nemesis: Nemesis, is_over: Callable[[], bool]) -> None:
    nemesis.strike_within(seconds, rng, only)


def _strike_in_order(names: Sequence[str], nemesis: Nemesis, is_over: Callable[[], bool]) -> None:
    nemesis.strike_in_order(names, is_over)


def _report(folder: Path, outcome: Outcome, seed: int) -> None:
    summary = f"seed {seed}: {outcome.summary()}"
    print(summary)
    for finding in outcome.findings:
        print(f"{finding.rule}: {finding.text}")
    (folder / "report.html").write_text(timeline.page(outcome.history, outcome.findings, summary))
    verdict = {"seed": seed, "findings": [finding._asdict() for finding in outcome.findings], **_rows(outcome.history)}
    (folder / "verdict.json").write_text(json.dumps(verdict) + "\n")
    print(f"picture and record: {folder / 'report.html'}, {folder / 'verdict.json'}", flush=True)


def _rows(history: History) -> dict[str, list[tuple[object, ...]]]:
    """Return the tables of verdict.json: messages, deliveries, confirmed acks, faults and windows."""
    began = {joined.consumer: joined.at for joined in history.joined}
    none = Sent(0.0, "", UNKNOWN, "", -1)
    sent = [(message.sending, message.sent or none) for message in history.messages.values()]
    got = [delivery.got for delivery in history.got]
    windows = {kind: [window for window in history.windows if window.kind == kind] for kind in (MARKED, SLAVE_STOPPED)}
    return {
        "sent": [
            (at.id, at.subject, at.sender, at.at, then.at, then.outcome, then.broker_group, then.sequence)
            for at, then in sent
        ],
        "delivered": [
            (
                delivery.id,
                delivery.subject,
                delivery.broker_group,
                delivery.sequence,
                delivery.consumer,
                began[delivery.consumer],
                delivery.at,
            )
            for delivery in got
        ],
        "acked": [(delivery.got.id, delivery.kept_at) for delivery in history.got if delivery.is_kept],
        "faults": [(fault.name, fault.broker_group, fault.begin, fault.end) for fault in history.faults],
        "marked": [("mark readonly", window.broker_group, window.begin, window.end) for window in windows[MARKED]],
        "slave_stopped": [
            ("stop slave", window.broker_group, window.begin, window.end) for window in windows[SLAVE_STOPPED]
        ],
    }


def _say(line: str) -> None:
    print(f"  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
