"""Bad input that proxies could cut or hide: each API returns a clear error, and no session is left.

`tests/integration/test_api_promises.py` has each field's wrong values.
"""

import json
import urllib.error
import urllib.request

import grpc
import pytest

from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.rpc_errors import error_from_rpc

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

HTTP = {
    "prompt of 10 MB": ({"prompt": "x" * 10_000_000}, 413, None),
    "prompt of 2 MB": ({"prompt": "x" * 2_000_000}, 400, "prompt"),
    "invalid UTF-8": (b'{"prompt": "\xff\xfe"}', 400, "body"),
}
RPC = {
    "prompt of 10 MB": (pb.GenerateRequest(text="x" * 10_000_000).SerializeToString(), "prompt"),
    "invalid UTF-8": (b"\x12\x02\xff\xfe", "text"),  # field 2 is `text`
}


def post(cluster, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{cluster.http}/v1/completions", data, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(("body", "status", "param"), HTTP.values(), ids=HTTP)
def test_bad_http_request_gets_an_error_object(cluster, body, status, param):
    got, answer = post(cluster, body)
    assert got == status, answer
    error = answer["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").split("[")[0] == (param or "")
    assert 0 < len(error["message"]) < 500


@pytest.mark.parametrize(("request_bytes", "field"), RPC.values(), ids=RPC)
def test_bad_call_names_the_field_in_its_details(cluster, request_bytes, field):
    with grpc.insecure_channel(cluster.grpc) as channel:
        generate = channel.unary_stream("/gammaray.v1.GenerationService/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            list(generate(request_bytes, timeout=60))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_from_rpc(caught.value).field == field
