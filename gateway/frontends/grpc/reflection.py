"""Server reflection: which services are here, and what are their messages?"""

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from grpc_reflection.v1alpha import reflection_pb2 as pb
from grpc_reflection.v1alpha.reflection import aio

from gateway.frontends.grpc.methods import Method
from gateway.frontends.grpc.rpc import Call

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["ServerReflection"]
NAMES = (DESCRIPTOR.full_name, "grpc.reflection.v1.ServerReflection")
"""The two versions have the same messages; clients ask for the newer one first."""


class ReflectionServicer:
    """Tells of services by grpcio's own answers."""

    def __init__(self, services: Iterable[str]) -> None:
        self._answers: Any = aio.ReflectionServicer((*services, *NAMES))

    def methods(self) -> Iterator[tuple[str, Method]]:
        """The paths of both versions."""
        (described,) = DESCRIPTOR.methods
        for name in NAMES:
            yield (
                f"/{name}/{described.name}",
                Method(
                    self.ServerReflectionInfo,
                    pb.ServerReflectionRequest.FromString,
                    pb.ServerReflectionResponse.SerializeToString,
                    client_streams=True,
                    server_streams=True,
                ),
            )

    async def ServerReflectionInfo(
        self, requests: AsyncIterator[pb.ServerReflectionRequest], call: Call
    ) -> None:
        async for answer in self._answers.ServerReflectionInfo(requests, None):
            await call.send([answer.SerializeToString()])
