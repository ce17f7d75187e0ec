"""Operators' commands as one table, for the metaserver and for the tools."""
