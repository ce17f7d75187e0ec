"""The nightly audit, and message logs as tables of Spark."""

from qmq.audit.data_source import register

__all__ = ["register"]
