"""Bad input that proxies could cut or hide: each API returns a clear error, and no session is left.

Wrong values of fields are tested in tests/unit/orchestrator/api/http/test_http_errors.py.
"""

import grpc
import httpx
import pytest

from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.rpc_errors import error_from_rpc

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

TEXT = "x" * 10_000_000


def test_large_http_request_gets_an_error_object(cluster):
    answer = httpx.post(f"{cluster.http}/v1/completions", json={"prompt": TEXT}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (413, "invalid_request_error")
    assert 0 < len(error["message"]) < 500


def test_large_call_names_the_field_in_its_details(cluster):
    request = pb.GenerateRequest(text=TEXT).SerializeToString()
    with grpc.insecure_channel(cluster.grpc) as channel:
        generate = channel.unary_stream("/gammaray.v1.GenerationService/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            list(generate(request, timeout=60))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_from_rpc(caught.value).field == "prompt"
