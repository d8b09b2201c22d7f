"""Versions of a head that take turns in an engine that has room for one."""

import itertools
from contextlib import closing
from unittest.mock import Mock

import pytest

from gammaray.learning.folder import LearningFolder
from services.engine.core.errors import EngineLostError
from services.learning.swapped_head import SPAN_S, SwappedHead
from services.learning.versions import LoadedDrafters
from tests.support.learning_helpers import publish
from tests.support.workers.redis_helpers import wait_until


def head_of(path, swap):
    versions = LoadedDrafters("base", lambda directory: directory, LearningFolder(path))
    return SwappedHead(versions, swap)


def test_a_candidate_drafts_for_a_third_of_the_turns_and_a_promoted_version_for_all(tmp_path):
    swaps = []
    store = LearningFolder(tmp_path).store("open")
    with closing(head_of(tmp_path, swaps.append)) as head:
        head.take_turns(0.0)
        assert (head.number, swaps) == (0, [])
        publish(store)

        def share():
            numbers = []
            for turn in range(3000):
                head.take_turns((turn + 0.5) * SPAN_S)
                numbers.append(head.number)
            return numbers.count(1) / len(numbers)

        wait_until(lambda: share() > 0)
        assert 0.3 < share() < 0.37
        assert set(swaps) == {"base", str(store.directory(1))}
        assert all(one != other for one, other in itertools.pairwise(swaps)), "only changes load"
        store.promote(1)
        wait_until(lambda: share() == 1)


def test_a_version_that_loses_the_engine_is_rolled_back_before_the_worker_starts_again(tmp_path):
    swap = Mock(side_effect=EngineLostError("out of memory"))
    store = LearningFolder(tmp_path).store("open")
    with closing(head_of(tmp_path, swap)) as head:
        publish(store)
        store.promote(1)

        with pytest.raises(EngineLostError):
            wait_until(lambda: head.take_turns(0.0))
        assert store.read().stable == 0
        assert "out of memory" in store.read().versions[0].reason
