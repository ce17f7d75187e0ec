"""Replication: who may act, what is safe, and how two copies of a log come to agree."""
