"""What Ray Serve registers for GenerationService: requests that cannot be read reach our own code.

Serve, and gRPC itself, answer a request that does not parse with a status of their own, without a word on
what is wrong. Here such a request becomes a `Malformed`, which the servicer refuses as it does any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from gammaray.errors import InvalidArgumentError
from gammaray.v1 import generation_service_pb2 as pb

__all__ = ["Malformed", "add_generation_service", "readable"]

MessageT = TypeVar("MessageT", bound=Message)

_SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]
_LENGTH_DELIMITED = 2  # wire type of strings and messages


@dataclass(frozen=True)
class Malformed:
    """Stands for a request that could not be read; the fields are those of `InvalidArgumentError`."""

    field: str
    got: str
    allowed: str


def add_generation_service(servicer: Any, server: grpc.Server) -> None:
    """Register every method of GenerationService; takes the place of the generated function."""
    handlers = {method.name: _handler(servicer, method) for method in _SERVICE.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers),))


def readable(request: MessageT | Malformed) -> MessageT:
    """Return the request.

    Raises:
        InvalidArgumentError: It could not be read.
    """
    if isinstance(request, Malformed):
        raise InvalidArgumentError(request.field, request.got, request.allowed)
    return request


def _handler(servicer: Any, method: MethodDescriptor) -> Any:
    make = (
        grpc.unary_stream_rpc_method_handler
        if method.server_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(
        getattr(servicer, method.name),
        request_deserializer=_deserializer(method.input_type),
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )


def _deserializer(descriptor: Descriptor) -> Callable[[bytes], Message | Malformed]:
    parse = GetMessageClass(descriptor).FromString

    def deserialize(data: bytes) -> Message | Malformed:
        try:
            return parse(data)
        except DecodeError:
            name = next(_not_utf8(data, descriptor, ""), None)
            if name is None:
                return Malformed("request", f"{len(data)} bytes", f"a serialized {descriptor.full_name}")
            return Malformed(name, "invalid UTF-8", "text in UTF-8")

    return deserialize


def _not_utf8(data: bytes, descriptor: Descriptor, prefix: str) -> Iterator[str]:
    """Yield the names of string fields that are not UTF-8, with dots for nested ones."""
    try:
        fields = UnknownFieldSet(Empty.FromString(data))
    except DecodeError:  # no protobuf at all
        return
    for unknown in (fields[index] for index in range(len(fields))):
        field = descriptor.fields_by_number.get(unknown.field_number)
        if field is None or unknown.wire_type != _LENGTH_DELIMITED:
            continue
        name = f"{prefix}{field.name}"
        if field.message_type is not None:
            yield from _not_utf8(unknown.data, field.message_type, f"{name}.")
        elif field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(unknown.data):
            yield name


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
