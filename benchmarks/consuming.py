"""Shell. Consuming beyond one stream: many subjects, many consumers, few messages of many, backlogs, and fairness.

A backlog without consumers is measured, and the restart of a master with a long log. Fairness is the p99 of other
consumers with and without one consumer, group or backlog, in turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import mean

from benchmarks.figures import MIB, Clock, Figure, free_disk_bytes, resident_bytes
from benchmarks.speed import GROUP, WARM_MESSAGES, Meter, Sizes, Speed, logs_of
from benchmarks.worker import Worker
from qmq.deploy.local import Cluster

CROWD_PER_S = 20
"""Messages; each goes to every group."""
SETTLE_S = 5
"""Warm-up of a new listener of many subjects before its latencies count."""
RARE = 100
"""One message in so many has the selected tag."""


class Consuming:
    """Measures one cluster, as `Speed` does."""

    def __init__(self, speed: Speed) -> None:
        self._speed = speed

    def subjects(self) -> list[Figure]:
        """Measure one message per second on each of many new subjects, from `send_nowait` to the handler."""
        speed, count = self._speed, self._speed.sizes.subjects
        p50, p99 = Figure("subjects_p50_ms", more_is_better=False), Figure("subjects_p99_ms", more_is_better=False)
        messages = count * speed.sizes.phase_s
        for _ in range(max(2, speed.sizes.repetitions - 2)):
            prefix = speed.subject()
            with speed.worker("producer") as producer, speed.worker("listener") as listener:
                producer.run("pace_subjects", prefix=prefix, subjects=count, messages=count, per_second=count)
                before = count * (1 + SETTLE_S)
                listener.begin(
                    "latency_subjects",
                    prefix=prefix,
                    subjects=count,
                    group="g",
                    messages=before + messages,
                    skipped=before,
                )
                # A thousand subscriptions, and the messages that waited for them, are no steady state yet.
                producer.run(
                    "pace_subjects", prefix=prefix, subjects=count, messages=count * SETTLE_S, per_second=count
                )
                clock = Clock(speed.pids(producer=producer, listener=listener))
                producer.run("pace_subjects", prefix=prefix, subjects=count, messages=messages, per_second=count)
                measured = listener.end()
                spent = clock.spent()
            p50.values.append(measured["p50_ms"])
            p99.values.append(measured["p99_ms"])
            p50.elsewhere.append(spent.elsewhere)
            p50.cpu_us = {name: seconds / messages * 1e6 for name, seconds in spent.cpu_s.items()}
            speed.say(f"subjects   p50 {measured['p50_ms']:.3f} ms  p99 {measured['p99_ms']:.3f} ms")
        p99.elsewhere = p50.elsewhere
        p99.note = f"{count:,} subjects, 1 message/s on each"
        return [p50, p99]

    def crowd(self) -> list[Figure]:
        """Measure a thousand consumers in a hundred groups of one subject; every group gets every message."""
        speed, sizes = self._speed, self._speed.sizes
        p50, p99 = Figure("crowd_p50_ms", more_is_better=False), Figure("crowd_p99_ms", more_is_better=False)
        messages = CROWD_PER_S * sizes.phase_s
        with speed.worker("producer") as producer, speed.crowd() as crowd:
            subject = speed.subject()
            producer.run("send_one", subject=subject, messages=1, size=100)
            crowd.run(
                "join", name="crowd", subject=subject, groups=sizes.groups, consumers=sizes.members, is_measured=True
            )
            producer.run("pace", subject=subject, messages=CROWD_PER_S, per_second=CROWD_PER_S)
            crowd.run("latencies")
            for _ in range(sizes.pairs):
                clock = Clock(speed.pids(producer=producer, crowd=crowd))
                producer.run("pace", subject=subject, messages=messages, per_second=CROWD_PER_S)
                measured, spent = crowd.run("latencies"), clock.spent()
                p50.values.append(measured["p50_ms"])
                p99.values.append(measured["p99_ms"])
                p50.elsewhere.append(spent.elsewhere)
                handed = measured["messages"]
                p50.cpu_us = {name: seconds / handed * 1e6 for name, seconds in spent.cpu_s.items()}
                speed.say(f"crowd      p50 {measured['p50_ms']:.3f} ms  p99 {measured['p99_ms']:.3f} ms  {handed:,}")
        p99.elsewhere = p50.elsewhere
        p50.note = f"CPU per delivery; master {spent.cpu_s['master'] / spent.seconds:.0%} of a core"
        consumers = sizes.groups * sizes.members
        p99.note = f"{consumers:,} consumers in {sizes.groups} groups, {CROWD_PER_S} messages/s to each group"
        return [p50, p99]

    def tags(self) -> list[Figure]:
        """Measure CPU time per message of the log: for reading everything, and for a tag of one message in a
        hundred.
        """
        speed, messages = self._speed, self._speed.sizes.consume
        subject = speed.subject()
        with speed.worker() as client:
            client.run("produce_tagged", subject=subject, messages=messages, size=1024, one_in=RARE)
            client.run("produce_tagged", subject=f"{subject}.warm", messages=WARM_MESSAGES, size=1024, one_in=RARE)
        every, rare = Figure("read_all_per_s"), Figure("read_tagged_per_s")
        for number in range(max(2, speed.sizes.repetitions - 2)):
            for figure, tags, wanted in ((every, [], messages), (rare, ["rare"], messages // RARE)):
                with speed.worker() as client:
                    group = f"{figure.name}.{number}"
                    client.run("drain", subject=f"{subject}.warm", messages=WARM_MESSAGES, group=group)
                    meter = Meter(speed.pids(client=client), counted=messages)
                    measured = meter.run(client, "drain", subject, wanted, group=group, tags=tags)
                    figure.values.append(messages / measured["seconds"])
                    meter.account(figure)
                    speed.say(f"{figure.name:<20} {figure.values[-1]:>12,.0f}")
        ratio = Figure(
            "tags_cost_ratio", [sum(rare.cpu_us.values()) / sum(every.cpu_us.values())], more_is_better=False
        )
        ratio.note = "CPU of all processes per message of the log; one in a hundred matches"
        return [every, rare, ratio]


MESSAGE_BYTES = 1_200
"""Log bytes of a message with 1,024 bytes of content, with its id and its share of the frame; rounded up."""
KEPT_FREE_BYTES = 8 << 30
"""Disk left free for other programs; also more than a broker's own limit."""
STEPS = 20
RESTARTS = 3
SAMPLE_S = 0.1


class Backlog:
    """Fills a fresh cluster's log, watches memory and rate, then kills its master."""

    def __init__(self, cluster: Cluster, sizes: Sizes, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._say = say
        self._speed = Speed(cluster, sizes, say)
        free = free_disk_bytes(cluster.run_dir) - KEPT_FREE_BYTES
        self._messages = max(0, min(sizes.backlog, free // (2 * MESSAGE_BYTES))) // STEPS * STEPS
        self.shortened = ""
        if self._messages < sizes.backlog:
            self.shortened = f"only {self._messages:,} messages: {free / (1 << 30):.0f} GiB of disk are free for it. "

    def fill(self) -> list[Figure]:
        """Produce the backlog in steps while sampling the broker's memory."""
        rates, elsewhere = [], []
        with self._speed.worker() as client, _Memory(self._speed.pids()) as memory:
            client.run("send_one", subject="backlog", messages=10, size=1024)
            memory.begin()
            clock = Clock(self._speed.pids(client=client))
            for step in range(1, STEPS + 1):
                part = Clock({})
                measured = client.run("produce", subject="backlog", messages=self._messages // STEPS, size=1024)
                rates.append(measured["messages"] / measured["seconds"])
                elsewhere.append(part.spent().elsewhere)
                if step % 4 == 0:
                    self._say(
                        f"backlog of {step * self._messages // STEPS:>11,} messages  {mean(rates[-4:]):>9,.0f}/s  "
                        f"master +{memory.raised('master') / MIB:.0f} MB, slave +{memory.raised('slave') / MIB:.0f} MB"
                    )
            spent = clock.spent()
        cpu = {name: seconds / self._messages * 1e6 for name, seconds in spent.cpu_s.items()}
        first, last = mean(rates[: STEPS // 10]), mean(rates[-STEPS // 10 :])
        tenths = f"{self.shortened}first tenth {first:,.0f}/s, last tenth {last:,.0f}/s"
        raised = {role: memory.raised(role) / MIB for role in ("master", "slave")}
        note = (
            f"{self.shortened}{self._messages:,} messages; master +{raised['master']:.0f} MB, "
            f"slave +{raised['slave']:.0f} MB at most"
        )
        return [
            Figure("backlog_rss_mb", [max(raised.values())], note=note, more_is_better=False),
            Figure("backlog_per_s", rates, elsewhere, cpu, note=tenths),
            Figure("backlog_last_to_first_tenth", [last / first]),
        ]

    def restart(self) -> list[Figure]:
        """Measure the time from the master's SIGKILL to an acknowledged message; the runner restarts it without
        pause.
        """
        figure = Figure("restart_s", more_is_better=False)
        size = sum(path.stat().st_size for path in logs_of(self._cluster)[0].rglob("*.log"))
        with self._speed.worker() as client:
            for number in range(RESTARTS):
                client.run("send_one", subject="restart", messages=10, size=1024)
                starts, clock, began = self._cluster.starts, Clock({}), time.monotonic()
                self._cluster.kill(GROUP, "master")
                while self._cluster.starts == starts:
                    time.sleep(0.005)
                with self._speed.worker(f"restart{number}") as fresh:
                    fresh.run("send_one", subject="restart", messages=1, size=1024, timeout_s=120.0)
                figure.values.append(time.monotonic() - began)
                figure.elsewhere.append(clock.spent().elsewhere)
                self._say(f"restart_s {figure.values[-1]:>8.2f}")
                self._cluster.wait_writable(GROUP)
        figure.note = f"{self.shortened}log of {size / (1 << 30):.1f} GiB, the newest part of it in the page cache"
        return [figure]


class _Memory:
    """Samples resident memory of processes; `raised` is the maximum since `begin` minus the value then."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._base: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> _Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def begin(self) -> None:
        self._base = {name: resident_bytes(pid) for name, pid in self._pids.items()}
        self._peak = dict(self._base)
        self._thread.start()

    def raised(self, name: str) -> int:
        return self._peak[name] - self._base[name]

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            for name, pid in self._pids.items():
                self._peak[name] = max(self._peak[name], resident_bytes(pid))


PACE_PER_S = 200
"""Messages of the quiet consumers: enough for a p99, too few to fill a core."""
CONSUMERS, BIG, SMALL = 50, 200, 2
DRAIN_PER_S = 5_000
"""Messages of 1 KiB that a consumer takes from the backlog meanwhile."""

Step = Callable[[Worker, str], None]


class Fairness:
    """Measures one cluster. A phase without and a phase with the burden are a pair; the figure is their ratio."""

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self._before: list[float] = []

    def stalled(self) -> list[Figure]:
        """Measure fifty consumers of a group, without and with one that reads none of its deliveries."""
        subject = self._speed.subject()

        def without(crowd: Worker, name: str) -> None:
            crowd.run("join", name=name, subject=subject, groups=1, consumers=1, is_measured=False)

        def burden(crowd: Worker, name: str) -> None:
            crowd.run("stall", name=name, subject=subject, group="others-0")

        return self._compare("stalled", subject, CONSUMERS - 1, without, burden)

    def big_group(self) -> list[Figure]:
        """Measure a group of two consumers, beside another of two and beside one of two hundred."""
        subject = self._speed.subject()

        def beside(consumers: int) -> Step:
            def step(crowd: Worker, name: str) -> None:
                crowd.run("join", name=name, subject=subject, groups=1, consumers=consumers, is_measured=False)

            return step

        return self._compare("big_group", subject, SMALL, beside(SMALL), beside(BIG))

    def without_backlog(self) -> list[Figure]:
        """Return the p99 of a quiet subject before there is a backlog."""
        with self._speed.worker("producer") as producer, self._speed.crowd() as crowd:
            self._begin(producer, crowd, "quiet", SMALL)
            self._before = [self._phase(producer, crowd, "quiet") for _ in range(self._speed.sizes.pairs)]
        return []

    def beside_backlog(self) -> list[Figure]:
        """Measure it beside the backlog, and while a consumer takes the backlog at a steady rate."""
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
        """Measure pairs of phases; `bearer` is the worker with the burden's consumers, if not the crowd."""
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
