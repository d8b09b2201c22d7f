"""Sizes of blocks, by which a worker bounds those in flight."""

from gammaray.blocks import Features, Shape
from services.scheduling.tasks import ID_BYTES, ProposeTask


def block(**fields):
    return ProposeTask(
        request_id=1,
        session_id="s",
        epoch=1,
        base_position=3,
        context_start=0,
        context=[1, 2, 3],
        spec=None,
        deadline=0.0,
        deliver=lambda task, reply: None,
        shape=Shape(2),
        **fields,
    )


def test_features_count_as_ids_of_the_same_memory():
    features = Features(0, 100, 60, b"\0" * 6000, b"\0" * 400)
    assert block().num_ids == 3
    assert block(features=features).num_ids == 3 + 6400 // ID_BYTES
