"""Shell. Leases on real databases: of concurrent requests one wins, and each holder has its own term."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from qmq.metaserver.model import LeaseRow
from qmq.metaserver.storage.engine import open_database
from qmq.metaserver.storage.repository import Repository

NAME = "watchdog/default"


@pytest.fixture
def repository(migrated_url):
    engine = open_database(migrated_url)
    yield Repository(engine)
    engine.dispose()


def ask(repository, node, seen=None, *, take=False, release=False):
    wish = LeaseRow(NAME, node, seen.term if seen else 0, seen.beat if seen else 0, f"{node}:1")
    return repository.hold_lease(wish, take=take, release=release)


def test_lease_is_renewed_taken_and_returned(repository):
    first = ask(repository, "a")
    assert (first.node, first.term, first.beat, first.address) == ("a", 1, 0, "a:1")
    kept = ask(repository, "a", first)
    assert (kept.node, kept.term, kept.beat) == ("a", 1, 1)
    assert (repository.leases()[0].beat, repository.leases()[0].address) == (1, "a:1")
    assert ask(repository, "a", first).beat == 2, "who had no answer the last time keeps it, too"
    kept = ask(repository, "a", first)
    assert ask(repository, "b", first).node == "a", "nobody takes what he does not ask for"
    assert ask(repository, "b", first, take=True).node == "a", "it was kept since"
    assert ask(repository, "b", kept, release=True).node == "a", "nor releases what is another one's"
    taken = ask(repository, "b", kept, take=True)
    assert (taken.node, taken.term, taken.address) == ("b", 2, "b:1")
    assert ask(repository, "a", kept).node == "b"
    assert ask(repository, "a", taken).node == "b", "to know how the row is does not make it one's own"
    assert ask(repository, "b", taken, release=True).node == ""
    assert (ask(repository, "a", kept).node, repository.leases()[0].term) == ("a", 3)


def test_concurrent_lease_claims_have_one_winner(repository):
    for round_number in range(1, 6):
        seen = repository.leases()[0] if repository.leases() else None
        names = [f"n{round_number}-{number}" for number in range(8)]
        with ThreadPoolExecutor(8) as threads:
            rows = list(threads.map(lambda name, seen=seen: ask(repository, name, seen, take=True), names))
        assert len({row.node for row in rows}) == 1 and {row.term for row in rows} == {round_number}
