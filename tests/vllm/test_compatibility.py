"""The names of vLLM that are used, in the version that is supported."""

from services.vllm.compatibility import SUPPORTED, check_vllm, find_missing, installed_version


def test_the_supported_version_has_every_name():
    assert installed_version().startswith(f"{SUPPORTED}.")
    assert find_missing() == []
    check_vllm()
