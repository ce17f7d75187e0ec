"""Processes of an application that handle messages: the command `qmq worker`."""
