"""The nightly audit, and message logs as tables of Spark."""

from qmq.audit.spark import register

__all__ = ["register"]
