"""How requests of the public gRPC API are read, the unreadable ones too."""

from types import SimpleNamespace

import pytest

from gammaray.errors import InvalidArgumentError
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.v1 import generation_service_pb2_grpc as pb_grpc
from orchestrator.grpc_handlers import add_generation_service, readable

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]


def registered(add):
    """Return the handlers that `add` registers, by path."""
    found = {}
    methods = {method.name: None for method in SERVICE.methods}
    server = SimpleNamespace(
        add_generic_rpc_handlers=lambda handlers: found.update(
            {
                name: handlers[0].service(SimpleNamespace(method=f"/{SERVICE.full_name}/{name}"))
                for name in methods
            }
        ),
        add_registered_method_handlers=lambda name, handlers: None,
    )
    add(SimpleNamespace(**methods), server)
    return found


def read(data, method="Generate"):
    return readable(registered(add_generation_service)[method].request_deserializer(data))


def test_handlers_are_those_of_the_generated_function():
    ours = registered(add_generation_service)
    generated = registered(pb_grpc.add_GenerationServiceServicer_to_server)
    assert ours.keys() == generated.keys()
    for name, handler in generated.items():
        assert handler.request_streaming is ours[name].request_streaming is False
        assert handler.response_streaming is ours[name].response_streaming


def test_readable_request_is_read():
    request = pb.GenerateRequest(text="caf\u00e9", stop=["\n"], sampling={"top_p": 0.5})
    assert read(request.SerializeToString()) == request


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"\x12\x02\xff\xfe", "text"),
        (b"\x12\x01x\x32\x01\xff", "stop"),
        (b"\x0a\x01\xc3", "model"),
        (b"\xff\xff\xff", "request"),
        (b"\x12\x05ab", "request"),
    ],
)
def test_unreadable_request_names_the_field(data, field):
    with pytest.raises(InvalidArgumentError) as caught:
        read(data)
    assert caught.value.field == field
