"""Shell. ListQuarantine and ClearQuarantine."""

from __future__ import annotations

from qmq.errors import NotServed
from qmq.proto import qmq_pb2 as pb

PART, EVIDENCE = f"{0:020d}-{9:020d}-seeded-anew-0", f"{9:020d}-{20:020d}-0"


class Quarantines:
    """Quarantines of both brokers of g1; a silent one does not answer."""

    def __init__(self, world):
        self.parts = {"g1-a": [], "g1-b": [(PART, False), (EVIDENCE, True)]}
        world.brokers.quarantine = self.quarantine

    async def quarantine(self, broker, request):
        if broker.hostname not in self.parts:
            raise NotServed(f"{broker.key} did not answer")
        parts = [part for part in self.parts[broker.hostname] if part[0] in request.cleared or not request.cleared]
        if request.cleared:
            self.parts[broker.hostname] = [part for part in self.parts[broker.hostname] if part not in parts]
        return pb.QuarantineAnswer(
            parts=[pb.KeptPart(name=name, bytes=10, evidence=evidence) for name, evidence in parts], bytes_max=100
        )


async def test_quarantine_of_each_copy_is_listed(cluster):
    kept = Quarantines(cluster)
    del kept.parts["g1-a"]
    listed = await cluster.done("ListQuarantine", brokerGroup="g1")
    assert [(row["hostname"], row["bytes"], len(row["parts"])) for row in listed["brokers"]] == [
        ("g1-a", 0, 0),
        ("g1-b", 20, 2),
    ]
    assert listed["unasked"] == {"g1-a:20881": "g1-a:20881 did not answer"}


async def test_evidence_is_cleared_by_name_only(cluster):
    kept, words = Quarantines(cluster), {"brokerGroup": "g1", "host": "g1-b"}
    preview = await cluster.done("ClearQuarantine", dryRun="true", **words)
    assert preview["wouldChange"] and [part["name"] for part in preview["before"]] == [PART]
    assert len(kept.parts["g1-b"]) == 2
    assert (await cluster.done("ClearQuarantine", **words))["bytes"] == 10
    assert kept.parts["g1-b"] == [(EVIDENCE, True)]
    assert "1 parts are evidence, and go by name: --parts" in await cluster.refused("ClearQuarantine", **words)
    assert "has no such part" in await cluster.refused("ClearQuarantine", parts=PART, **words)
    await cluster.done("ClearQuarantine", parts=EVIDENCE, **words)
    assert not kept.parts["g1-b"]
    results = [row.result for row in await cluster.audit() if row.action == "ClearQuarantine"]
    assert [result for result in results if result in ("begun", "done")] == ["done", "begun"] * 2
    assert "no broker of g1" in await cluster.refused("ClearQuarantine", brokerGroup="g1", host="other")
