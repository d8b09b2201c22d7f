"""Make docs/telemetry.md of `gammaray.telemetry.names`.

python docs/make_telemetry.py            # write
python docs/make_telemetry.py --check    # exit with 1 when it is not what would be written
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from gammaray.telemetry.names import ATTRIBUTES, SPANS, Attribute, Span

PAGE = Path(__file__).with_name("telemetry.md")

_INTRODUCTION = """\
# Spans and attributes

Made of [names.py](../gammaray/telemetry/names.py) by `python docs/make_telemetry.py`; do not edit.
[observability.md](observability.md) tells how to switch traces on and what one looks like;
[metrics.md](metrics.md) has the metrics.

Names that begin with `gen_ai.` are OpenTelemetry's semantic conventions for generative AI. A span of kind
*client* waits, the *server* span below it is the worker's own, from its own process.
"""


def render() -> str:
    """Return the page."""
    return "\n".join([_INTRODUCTION, *_spans(), *_attributes()]) + "\n"


def _spans() -> Iterator[str]:
    yield "## Spans\n"
    yield "| span | kind | process | parent | what its time is | attributes (in brackets: some have it) |"
    yield "|---|---|---|---|---|---|"
    for span in SPANS:
        parent = f"`{span.parent}`" if span.parent else "the caller's"
        names = ", ".join(_names(span)) or "none"
        yield f"| `{span.name}` | {span.kind} | {span.process} | {parent} | {span.meaning} | {names} |"
    yield ""


def _names(span: Span) -> Iterator[str]:
    yield from (f"`{name}`" for name in span.always)
    yield from (f"(`{name}`)" for name in span.sometimes)


def _attributes() -> Iterator[str]:
    yield "## Attributes\n"
    yield "| attribute | type | unit | meaning | on |"
    yield "|---|---|---|---|---|"
    for attribute in ATTRIBUTES:
        where = ", ".join(_places(attribute))
        unit = f"`{attribute.unit}`" if attribute.unit else ""
        yield f"| `{attribute}` | {attribute.type} | {unit} | {attribute.meaning} | {where} |"


def _places(attribute: Attribute) -> Iterator[str]:
    for span in SPANS:
        if attribute in (*span.always, *span.sometimes):
            yield f"{span.name.removeprefix('gammaray.')} ({span.kind})"


def main() -> int:
    """Write the page, or compare it; return the exit status."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(render())
        return 0
    if PAGE.exists() and PAGE.read_text() == render():
        return 0
    print(f"{PAGE.name} is stale: run `python docs/make_telemetry.py`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
