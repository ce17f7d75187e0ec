"""Shell. What one consumer, group or backlog costs everybody else: p99 with it and without it, in turns."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.figures import Figure
from benchmarks.machine import Clock
from benchmarks.speed import Speed
from benchmarks.worker import Worker

PACE_PER_S = 200
"""Messages that others wait for: enough for a ninety-ninth percentile, too few to fill a core."""
CONSUMERS, BIG, SMALL = 50, 200, 2
DRAIN_PER_S = 5_000
"""Messages of the backlog that a consumer takes meanwhile, of 1 KiB each."""

Step = Callable[[Worker, str], None]


class Fairness:
    """Measures one cluster. A phase without and a phase with the burden are a pair; the figure is their ratio."""

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self._before: list[float] = []

    def stalled(self) -> list[Figure]:
        """Fifty consumers of a group, and the same with one of them that reads nothing of what it asked for."""
        subject = self._speed.subject()

        def without(crowd: Worker, name: str) -> None:
            crowd.run("join", name=name, subject=subject, groups=1, consumers=1, is_measured=False)

        def burden(crowd: Worker, name: str) -> None:
            crowd.run("stall", name=name, subject=subject, group="others-0")

        return self._compare("stalled", subject, CONSUMERS - 1, without, burden)

    def big_group(self) -> list[Figure]:
        """A group of two consumers, beside another of two and beside one of two hundred."""
        subject = self._speed.subject()

        def beside(consumers: int) -> Step:
            def step(crowd: Worker, name: str) -> None:
                crowd.run("join", name=name, subject=subject, groups=1, consumers=consumers, is_measured=False)

            return step

        return self._compare("big_group", subject, SMALL, beside(SMALL), beside(BIG))

    def without_backlog(self) -> list[Figure]:
        """The p99 of a quiet subject before there is a backlog."""
        with self._speed.worker("producer") as producer, self._speed.crowd() as crowd:
            self._begin(producer, crowd, "quiet", SMALL)
            self._before = [self._phase(producer, crowd, "quiet") for _ in range(self._speed.sizes.pairs)]
        return []

    def beside_backlog(self) -> list[Figure]:
        """The same beside the backlog, and while a consumer takes it at a steady rate."""
        now = Figure("beside_backlog_p99_ms", more_is_better=False)
        with self._speed.worker("producer") as producer, self._speed.crowd() as crowd:
            self._begin(producer, crowd, "quiet", SMALL)
            now.values = [self._phase(producer, crowd, "quiet") for _ in self._before]
        pairs = [after / before for before, after in zip(sorted(self._before), sorted(now.values), strict=True)]
        ratio = Figure("beside_backlog_p99_ratio", pairs, more_is_better=False, note="beside a backlog over before it")
        with self._speed.crowd() as drainer:

            def without(crowd: Worker, name: str) -> None:
                crowd.run("join", name=name, subject="quiet", groups=1, consumers=1, is_measured=False)

            def burden(crowd: Worker, name: str) -> None:
                drainer.run("drain", name=name, subject="backlog", per_second=DRAIN_PER_S)

            drained = self._compare("beside_drain", "quiet", SMALL, without, burden, drainer)
        drained[-1].note = f"while a consumer takes {DRAIN_PER_S:,} messages/s of the backlog, over while none does"
        return [now, ratio, *drained]

    def _compare(
        self, name: str, subject: str, consumers: int, without: Step, burden: Step, bearer: Worker | None = None
    ) -> list[Figure]:
        """Measure pairs of phases; `bearer` is the worker in which the burden's consumers are, if not the crowd."""
        speed = self._speed
        p99 = {kind: Figure(f"{name}_{kind}_p99_ms", more_is_better=False) for kind in ("without", "with")}
        with speed.worker("producer") as producer, speed.crowd() as crowd:
            self._begin(producer, crowd, subject, consumers)
            for pair in range(speed.sizes.pairs):
                for kind, step, worker in (("without", without, crowd), ("with", burden, bearer or crowd)):
                    other, clock = f"{name}-{kind}-{pair}", Clock({})
                    step(crowd, other)
                    p99[kind].values.append(self._phase(producer, crowd, subject))
                    worker.run("leave", name=other)
                    p99[kind].elsewhere.append(clock.spent().elsewhere)
                before, after = (p99[kind].values[-1] for kind in ("without", "with"))
                speed.say(f"{name:<12} p99 {before:.3f} ms without, {after:.3f} ms with")
        pairs = zip(p99["with"].values, p99["without"].values, strict=True)
        ratio = Figure(f"{name}_p99_ratio", [after / before for after, before in pairs], more_is_better=False)
        return [*p99.values(), ratio]

    def _begin(self, producer: Worker, crowd: Worker, subject: str, consumers: int) -> None:
        producer.run("send_one", subject=subject, messages=1, size=100)
        crowd.run("join", name="others", subject=subject, groups=1, consumers=consumers, is_measured=True)
        self._phase(producer, crowd, subject)

    def _phase(self, producer: Worker, crowd: Worker, subject: str) -> float:
        """Return the p99 of the others, in milliseconds."""
        crowd.run("latencies")
        messages = PACE_PER_S * self._speed.sizes.phase_s
        producer.run("pace", subject=subject, messages=messages, per_second=PACE_PER_S)
        return float(crowd.run("latencies")["p99_ms"])
