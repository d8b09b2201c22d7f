"""Qualified names of sessions and responses, `TENANT:NAME`, or `NAME` where no keys name tenants."""

from __future__ import annotations

SEPARATOR = ":"
"""Not allowed in the names of tenants and sessions."""


def name_of(qualified: str) -> str:
    """Return the name by which its owner knows a session or response."""
    return qualified.rpartition(SEPARATOR)[2]


def tenant_of(qualified: str) -> str:
    """Return the tenant of a qualified name, or an empty string if it has none."""
    return qualified.rpartition(SEPARATOR)[0]
