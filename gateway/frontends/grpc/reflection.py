"""Server reflection: which services are here, and what are their messages?"""

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio

from gateway.frontends.grpc.methods import Method
from gateway.frontends.grpc.rpc import Call

REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
REFLECTION_NAMES = (REFLECTION.full_name, "grpc.reflection.v1.ServerReflection")
"""The two versions have the same messages; clients ask for the newer one first."""


class ReflectionServicer:
    """Tells of services by grpcio's own answers."""

    def __init__(self, services: Iterable[str]) -> None:
        self._answers: Any = aio.ReflectionServicer((*services, *REFLECTION_NAMES))

    def methods(self) -> Iterator[tuple[str, Method]]:
        """The paths of both versions."""
        (described,) = REFLECTION.methods
        for name in REFLECTION_NAMES:
            yield (
                f"/{name}/{described.name}",
                Method(
                    self.ServerReflectionInfo,
                    reflection_pb2.ServerReflectionRequest.FromString,
                    reflection_pb2.ServerReflectionResponse.SerializeToString,
                    client_streams=True,
                    server_streams=True,
                ),
            )

    async def ServerReflectionInfo(
        self, requests: AsyncIterator[reflection_pb2.ServerReflectionRequest], call: Call
    ) -> None:
        async for answer in self._answers.ServerReflectionInfo(requests, None):
            await call.send([answer.SerializeToString()])
