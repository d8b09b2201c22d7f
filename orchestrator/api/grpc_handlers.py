"""gRPC handlers of GenerationService for Ray Serve, with custom parsing of requests.

gRPC parses requests on the event loop, whatever their size, and answers an unparsable one with a status that
does not name the cause. Here a large or unparsable request reaches the servicer as `Unread`; `read` checks
its size, parses it in a thread, and raises an InvalidArgumentError if it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from gammaray.checks import MAX_TOKEN_IDS
from gammaray.errors import InvalidArgumentError
from gammaray.v1 import generation_service_pb2 as pb
from orchestrator.text.cpu_threads import INLINE_BYTES, in_parser_thread

MAX_FIELDS = 2**16
"""Limit on the fields of a request on the wire, including nested ones; a packed list counts as one field."""

MAX_NUMBERS = 2 * MAX_TOKEN_IDS
"""Limit on the numbers in all packed lists of a request, as parsing takes 25 ms per million."""

MessageT = TypeVar("MessageT", bound=Message)
T = TypeVar("T")

_SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_TOKEN_ID = FieldDescriptor.TYPE_UINT32
_CONTINUED = bytes(range(0x80, 0x100))
"""Bytes of a varint that have the continuation bit set."""


@dataclass(frozen=True)
class Unread:
    """A request of a type, by full name, that is not parsed yet, because it is large or unparsable."""

    message: str
    data: bytes


def add_generation_service(servicer: Any, server: grpc.Server) -> None:
    """Register every method of GenerationService; replaces the generated function."""
    handlers = {method.name: _handler(servicer, method) for method in _SERVICE.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers),))


async def read(request: MessageT | Unread, convert: Callable[[MessageT], T]) -> T:
    """Return the request converted by `convert`; a large one is parsed and converted off the event loop."""
    if isinstance(request, Unread):
        return await in_parser_thread(_parse, request, convert)
    return convert(request)


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


def _deserializer(descriptor: Descriptor) -> Callable[[bytes], Message | Unread]:
    parse = GetMessageClass(descriptor).FromString

    def deserialize(data: bytes) -> Message | Unread:
        if len(data) > INLINE_BYTES:
            return Unread(descriptor.full_name, data)
        try:
            return parse(data)
        except DecodeError:
            return Unread(descriptor.full_name, data)

    return deserialize


def _parse(request: Unread, convert: Callable[[Any], T]) -> T:
    descriptor = Default().FindMessageTypeByName(request.message)
    try:
        _check_size(request.data, descriptor)
        message = GetMessageClass(descriptor).FromString(request.data)
    except (DecodeError, _NoMessageError):
        allowed = f"a serialized {request.message}, with texts in UTF-8"
        raise InvalidArgumentError("request", f"{len(request.data)} bytes", allowed) from None
    return convert(message)


class _NoMessageError(Exception):
    """The bytes are not a protobuf message."""


def _check_size(data: bytes, descriptor: Descriptor) -> None:
    """Check the numbers of fields and of packed integers, which bound the cost of parsing."""
    num_numbers = 0
    for num_fields, length in enumerate(_packed_lengths(data, descriptor), start=1):
        num_numbers += length
        for got, limit, noun in (
            (num_fields, MAX_FIELDS, "fields"),
            (num_numbers, MAX_NUMBERS, "numbers in packed lists"),
        ):
            if got > limit:
                allowed = f"at most {limit}; lists of numbers are packed"
                raise InvalidArgumentError("request", f"more than {limit} {noun}", allowed)


def _packed_lengths(data: bytes, descriptor: Descriptor) -> Iterator[int]:
    """Yield the length of each field as a packed list of ids, 0 of others; those of nested messages, too."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        field = descriptor.fields_by_number.get(tag >> 3)
        kind, content = tag & 7, b""
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        elif kind == _LENGTH_DELIMITED:
            size, at = _varint(data, at)
            content, at = data[at : at + size], at + size
        else:
            raise _NoMessageError(f"wire type {kind}")
        if at > len(data):
            raise _NoMessageError("a field ends after the message")
        is_packed = field is not None and field.type == _TOKEN_ID
        yield len(content.translate(None, _CONTINUED)) if is_packed else 0
        if content and field is not None and field.message_type is not None:
            yield from _packed_lengths(content, field.message_type)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise _NoMessageError("a number without an end")
