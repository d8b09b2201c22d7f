"""Figures of a comparison: speeds with and without the first token, ranges, bounds and equality.

Every figure has one value per repetition; the median is reported with the smallest and largest value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from gammaray.bench.measure import Samples, Turn, first_difference, median_of, speeds
from gammaray.bench.rows import Row, row
from gammaray.bench.systems import Sample
from gammaray.bench.tables import plain_table

Figure = dict[str, Any]


def decode_speeds(repetitions: Sequence[Sequence[Turn]]) -> list[float] | None:
    """Return tokens per second of one stream after its first chunk, one value per repetition.

    None for systems that do not stream, or that delivered every completion in one chunk.
    """
    return _per_repetition(repetitions, _decode_seconds)


def decode_bounds(repetitions: Sequence[Sequence[Turn]]) -> list[float] | None:
    """Return what `decode_speeds` would be if everything but the target's own computing took no time.

    The target verifies the cycles of a session one after another, so no completion can be faster than this.
    Both are taken from the same cycles. None for systems that do not report the target's time.
    """
    if any(sample.target_s is None for sample in _flat(repetitions)):
        return None
    return _per_repetition(repetitions, lambda sample: sample.target_s or 0.0)


def _decode_seconds(sample: Sample) -> float:
    """Return the seconds after the first chunk.

    A client that waits for a core may see the first chunk together with later ones. Where the server reports
    when it had the first chunk, the time runs from there.
    """
    if sample.decode_s is not None:
        return sample.decode_s
    return sample.arrivals[-1][0] - sample.arrivals[0][0]


def _per_repetition(
    repetitions: Sequence[Sequence[Turn]], seconds: Callable[[Sample], float]
) -> list[float] | None:
    found = []
    for turns in repetitions:
        samples = [sample for sample in _flat([turns]) if len(sample.arrivals) > 1]
        tokens = sum(sum(count for _, count in sample.arrivals[1:]) for sample in samples)
        time_s = sum(map(seconds, samples))
        if not tokens or time_s <= 0:
            return None
        found.append(tokens / time_s)
    return found


def ranged(values: Sequence[float] | None) -> Figure | None:
    """Return median, least, largest and all values; None for none."""
    if not values:
        return None
    return {**median_of(values), "least": min(values), "largest": max(values)}


def figures(system: str, samples: Samples, plain: str) -> Row:
    """Return the row of a system.

    Args:
        system: Its name.
        samples: Those of all systems.
        plain: Name of the plain decoding of the same software; it may be missing.

    Returns:
        The row of `gammaray.bench.rows`, and

        - `tokens_per_s`: whole completions of all streams, over the time from request to last token.
        - `decode_tokens_per_s`: one stream, after its first chunk.
        - `decode_bound`: what the target's own computing allows; `bound_share`: how much of it is reached.
        - `over_plain`, `decode_over_plain`: ratios to `plain` of both speeds.
    """
    bases = {"over_plain": plain}
    found = row(system, samples, bases)
    decode, bound = decode_speeds(samples[system]), decode_bounds(samples[system])
    base = decode_speeds(samples[plain]) if plain in samples else None
    return {
        **found,
        "plain": plain,
        "tokens_per_s": ranged(speeds(samples[system])),
        "over_plain": ranged(found["over_plain"] and found["over_plain"]["values"]),
        "decode_tokens_per_s": ranged(decode),
        "decode_over_plain": ranged(_ratios(decode, base)),
        "decode_bound": ranged(bound),
        "bound_share": ranged(_ratios(decode, bound)),
    }


def equality(
    samples: Samples, references: Mapping[str, str], eos_token_ids: frozenset[int]
) -> list[dict[str, Any]]:
    """Compare the tokens of systems with those of their reference, completion by completion.

    Tokens after the reference's first end-of-sequence token are not compared: llama.cpp never emits one with
    `ignore_eos`, the other systems emit it and continue.

    Returns:
        For each system its reference, the number of completions, how many are equal, and for the first ten
        others the repetition, the completion and the first different token.
    """
    counts = []
    for system, reference in references.items():
        compared, different = 0, []
        for repetition, (ours, theirs) in enumerate(zip(samples[system], samples[reference], strict=True)):
            pairs = zip(_flat([ours]), _flat([theirs]), strict=True)
            for index, (our, their) in enumerate(pairs):
                end = _length(their.token_ids, eos_token_ids)
                at = first_difference(our.token_ids[:end], their.token_ids[:end])
                compared += 1
                if at is not None:
                    different.append({"repetition": repetition, "completion": index, "token": at})
        counts.append(
            {
                "system": system,
                "reference": reference,
                "compared": compared,
                "equal": compared - len(different),
                "different": different[:10],
            }
        )
    return counts


def table(title: str, rows: Sequence[Row], equal: Sequence[Mapping[str, Any]]) -> Table:
    """Return the rows as a table: medians with their range."""
    speed = ("tok/s", "x plain", "decode tok/s", "x plain ")
    found = plain_table(title, ("system", *speed, "bound", "% of it", "same"))
    same = {count["system"]: f"{count['equal']}/{count['compared']}" for count in equal}
    for one in rows:
        found.add_row(
            one["system"],
            _cell(one["tokens_per_s"], 1),
            _cell(one["over_plain"], 2),
            _cell(one["decode_tokens_per_s"], 1),
            _cell(one["decode_over_plain"], 2),
            "" if one["decode_bound"] is None else f"{one['decode_bound']['median']:.1f}",
            "" if one["bound_share"] is None else f"{100 * one['bound_share']['median']:.0f}",
            same.get(one["system"], ""),
        )
    return found


def _cell(figure: Figure | None, digits: int) -> str:
    if figure is None:
        return ""
    median, least, largest = (f"{figure[key]:.{digits}f}" for key in ("median", "least", "largest"))
    return median if least == largest else f"{median} ({least}-{largest})"


def _ratios(values: Sequence[float] | None, bases: Sequence[float] | None) -> list[float] | None:
    if values is None or bases is None:
        return None
    return [value / base for value, base in zip(values, bases, strict=True)]


def _length(token_ids: Sequence[int], eos_token_ids: frozenset[int]) -> int:
    """Return the number of tokens before the first end-of-sequence token."""
    return next((i for i, token_id in enumerate(token_ids) if token_id in eos_token_ids), len(token_ids))


def _flat(repetitions: Sequence[Sequence[Turn]]) -> list[Sample]:
    return [sample for turns in repetitions for turn in turns for sample in turn.samples]
