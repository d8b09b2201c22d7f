"""Calls of a gRPC servicer without a server."""

from google.rpc import status_pb2

from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.convert import chunk_from_proto
from gammaray.wire.rpc_errors import DETAILS_KEY, error_from_status
from orchestrator.api.grpc_servicer import GenerationServicer


class Context:
    """Records how a call ended."""

    def __init__(self, **metadata):
        self.code, self.details, self.trailers = None, "", []
        self._metadata = [(name.replace("_", "-"), value) for name, value in metadata.items()]

    def invocation_metadata(self):
        return self._metadata

    def peer(self):
        return "ipv4:127.0.0.1:5"

    def set_code(self, code):
        self.code = code

    def set_details(self, details):
        self.details = details

    def set_trailing_metadata(self, trailing_metadata):
        self.trailers = trailing_metadata

    @property
    def error(self):
        ((key, value),) = self.trailers
        assert key == DETAILS_KEY
        return error_from_status(status_pb2.Status.FromString(value))


async def generate(backend, **fields):
    """Return the chunks of a completion, and how its call ended."""
    context = Context()
    responses = GenerationServicer(backend).generate(pb.GenerateRequest(**fields), context)
    return [chunk_from_proto(response) async for response in responses], context
