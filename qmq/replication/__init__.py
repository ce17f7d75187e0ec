"""Replication: mastership, acknowledgement, and the agreement of two copies of a log."""
