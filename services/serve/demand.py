"""The targets' load, which the target pool's policy shares with the draft pool's policy.

Serve pickles a policy by value, with all objects that its module refers to, but modules by name. State that
two policies share must therefore be a variable of a third module.
"""

from __future__ import annotations

in_flight = 0.0
"""Blocks in flight at the target workers, at the last call of their policy."""
