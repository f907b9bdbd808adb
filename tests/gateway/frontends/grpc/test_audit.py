"""Lines of the audit log for RPCs without an answer."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.frontends.grpc.audit import GrpcAudit
from gateway.frontends.grpc.rpc import RpcCall
from gateway.policy.areas import Area
from gateway.policy.audit import AuditLog
from gateway.protos import grpc_service_pb2 as pb

PATH = "/inference.GRPCInferenceService/RepositoryModelLoad"


class Head:
    """The head of an RPC by a Unix socket."""

    peer = "unix:"
    caller = None


@pytest.mark.parametrize(
    ("end", "result"), [(asyncio.CancelledError, "aborted"), (RuntimeError, "INTERNAL")]
)
async def test_an_rpc_without_an_answer_is_aborted_or_has_failed(
    tmp_path: Path, end: type[BaseException], result: str
) -> None:
    log = AuditLog(tmp_path / "audit.log")

    async def serve(message: Any, call: RpcCall) -> Any:
        raise end

    audited = GrpcAudit(log, Area.MODEL_REPOSITORY, PATH).serving(serve)
    with pytest.raises(end):
        await audited(pb.RepositoryModelLoadRequest(model_name="m"), Head())  # type: ignore[arg-type]
    log.open()
    log.close()
    found = json.loads((tmp_path / "audit.log").read_text())
    assert (found["result"], found["model"], found["address"]) == (result, "m", "unix:")
