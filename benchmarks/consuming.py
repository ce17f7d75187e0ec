"""Shell. Many subjects, many consumers, few messages of many: what consuming costs where it is not one stream."""

from __future__ import annotations

from benchmarks.figures import Figure
from benchmarks.machine import Clock
from benchmarks.speed import WARM_MESSAGES, Meter, Speed

CROWD_PER_S = 20
"""Messages; each goes to every group."""
SETTLE_S = 5
"""How long a new listener of many subjects is fed before its latencies count."""
RARE = 100
"""One message in so many has the tag that is asked for."""


class Consuming:
    """Measures one cluster, as `Speed` does."""

    def __init__(self, speed: Speed) -> None:
        self._speed = speed

    def subjects(self) -> list[Figure]:
        """One message per second on each of many subjects, from `send_nowait` to the handler; all subjects are new."""
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
                # While it subscribes a thousand times, and takes what waited for that, it is no steady state yet.
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
        """A thousand consumers in a hundred groups of one subject; every group gets every message."""
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
        """CPU time per message of the log: reading everything; asking for a tag that one message in a hundred has."""
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
