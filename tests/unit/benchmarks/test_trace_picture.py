"""The timeline of a trace: which forwards are drawn where, in which colour."""

from itertools import count
from xml.etree import ElementTree

import pytest

from benchmarks.otlp_receiver import ReceivedSpan
from benchmarks.trace_picture import AFTER, AHEAD, EARLY, IN_VAIN, KINDS, VERIFIED, bars_of, cycles_of, draw
from gammaray.telemetry import names as t

MS = 1_000_000


@pytest.fixture
def spans():
    """Three cycles of 10 ms after a prompt; the third one's proposal is prepared and its block sent early."""
    found, ids = [], count(1)

    def add(name, kind, parent, start, end, **facts):
        span_id = f"{next(ids):016x}"
        facts, times = {getattr(t, key): value for key, value in facts.items()}, (start * MS, end * MS)
        found.append(ReceivedSpan(name, kind, "1" * 32, span_id, parent, *times, attributes=facts))
        return span_id

    for index in range(4):
        start, is_hit = 100 + 10 * index, index == 3
        shape = {"GAMMA": 4, "GAMMA_REASON": "fixed", "CYCLE_INDEX": index, "EMITTED": 3}
        cycle = add(t.SPAN_CYCLE, "internal", "root", start, start + 10, **shape, ACCEPTED=2, DRAFTED=4)
        propose = add(t.SPAN_PROPOSE, "client", cycle, start, start + 4, DRAFT_AHEAD_HIT=is_hit)
        work = {"QUEUE_MS": 1.0, "COMPUTE_MS": 2.0, "STEPS": 0 if is_hit else 4, "DRAFTED": 4}
        add(t.SPAN_PROPOSE, "server", propose, start, start + 4, **work)
        add(t.SPAN_AHEAD, "internal", propose, start + 5, start + 9, STEPS=7, AHEAD_STOPPED=True)
        verify = add(t.SPAN_VERIFY, "client", cycle, start + 4, start + 10)
        add(t.SPAN_VERIFY, "server", verify, start + 4, start + 8, **{**work, "STEPS": 1}, EARLY=is_hit)
    return found[::-1]


def test_forwards_are_drawn_by_who_asked_for_them_when(spans):
    bars = [(bar.kind, bar.start_ns / MS, bar.end_ns / MS) for bar in bars_of(cycles_of(spans)[2:])]
    assert bars == [
        (AFTER, 121, 123),
        (AHEAD, 125, 129),
        (VERIFIED, 125, 127),
        (IN_VAIN, 135, 139),  # no cycle follows; the proposal of this one needed no forwards
        (EARLY, 135, 137),
    ]


def test_picture_has_the_cycles_after_the_prompt_to_scale(spans):
    root = ElementTree.fromstring(draw(spans, 2, "a <pair>"))
    at = {kind: [] for kind in KINDS}
    for kind, colour in KINDS.items():
        for rect in root.findall(f"{{*}}rect[@fill='{colour}'][{{*}}title]"):
            at[kind].append((float(rect.get("x")), float(rect.get("width"))))
    assert [len(found) for found in at.values()] == [2, 1, 1, 2, 0]
    (ahead, width), ((verified, _), *_) = at[AHEAD][0], sorted(at[VERIFIED])[1:]
    assert ahead == verified  # both begin 5 ms after their cycle
    assert width == pytest.approx(2 * at[VERIFIED][0][1], abs=0.2)
    title, text = root.find("{*}title").text, "".join(root.itertext())
    assert title == "a <pair>: one stream, 2 of its 4 cycles, 6 tokens in 20 ms"
    assert "γ 4" in text
    assert "2/4" in text
    assert EARLY not in text  # nothing of the kind is drawn
