"""Shell. Databases for the tests of the outbox."""

from __future__ import annotations

from tests.support.databases import database_url, mariadb, postgresql

__all__ = ["database_url", "mariadb", "postgresql"]
