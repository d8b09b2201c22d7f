"""Which cores of this machine the workers of each role keep to."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["worker_cores"]


def worker_cores(cores: Collection[int], num_targets: int, num_drafts: int) -> dict[str, str]:
    """Give each role as many cores of its own as it has workers, the first ones to the targets.

    Workers of one role share theirs; all else may run on every core. With fewer cores than workers nobody is
    bound.

    Args:
        cores: What may be given away.
        num_targets: Number of target workers.
        num_drafts: Number of draft workers.

    Returns:
        By role the `cpu_affinity` of its workers, empty for none.
    """
    if len(cores) < num_targets + num_drafts:
        return {"target": "", "draft": ""}
    names = [str(core) for core in sorted(cores)]
    return {
        "target": ",".join(names[:num_targets]),
        "draft": ",".join(names[num_targets : num_targets + num_drafts]),
    }
