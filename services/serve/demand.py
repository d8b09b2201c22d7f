"""Whether there is anybody to draft for, as the target pool's policy tells the draft pool's.

Serve takes its copy of a policy by value, with all that the policy's module holds, objects of other modules
included. Modules it takes by name: what two policies share must be a variable of one that neither lives in.
"""

from __future__ import annotations

__all__ = ["in_flight"]

in_flight = 0.0
"""Blocks in flight at the target workers, as their policy saw them last."""
