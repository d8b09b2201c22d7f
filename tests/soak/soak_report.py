"""The result of a run as a table and as JSON."""

from dataclasses import asdict
from typing import Any

from tests.soak.soak_run import TTL_S, Options, Outcome
from tests.soak.trend import BOUNDS

HEAD = ("who", "what", "first", "second third", "last third", "allowed", "rose in", "")


def table(outcome: Outcome) -> str:
    lines = [HEAD]
    for (role, measure), found in outcome.trends().items():
        first = outcome.censuses[0].figures[role, measure]
        numbers = (f"{first:.1f}", f"{found.before:.1f}", f"{found.after:.1f}", f"+{found.allowed:.1f}")
        verdict = "GROWS" if found.grows else ""
        lines.append((role, measure, *numbers, f"{found.share:.0%}", verdict))
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    complaints = outcome.complaints()
    verdict = (
        [f"WRONG ({len(complaints)}):", *complaints] if complaints else ["nothing grew, nothing differed"]
    )
    return "\n".join([*text, "", outcome.campaign.table(), "", *verdict])


def figures(outcome: Outcome, options: Options) -> dict[str, Any]:
    return {
        "options": {**asdict(options), "session_ttl_s": TTL_S},
        "bounds": {name: asdict(bound) for name, bound in BOUNDS.items()},
        "done": {f"{what}: {result}": count for (what, result), count in outcome.campaign.counts.items()},
        "slowest_s": {what: round(seconds, 2) for what, seconds in outcome.slowest_s.items()},
        "samples_again": outcome.num_again,
        "trends": [
            {"role": role, "measure": measure, **asdict(found), "grows": found.grows}
            for (role, measure), found in outcome.trends().items()
        ],
        "censuses": [
            {
                "at_s": round(census.at_s, 1),
                "rest_s": round(census.rest_s, 1),
                **{f"{role}.{measure}": round(value, 2) for (role, measure), value in census.figures.items()},
            }
            for census in outcome.censuses
        ],
        "complaints": outcome.complaints(),
    }
