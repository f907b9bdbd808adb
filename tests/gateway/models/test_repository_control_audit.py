"""Lines of the audit log for loads and unloads that no client has requested."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import InferenceError
from gateway.in_process.server import Server
from gateway.models.backend_control import BackendControl
from gateway.models.repository import ModelRepository
from gateway.models.repository_control import RepositoryControl, audited
from gateway.policy.audit import AuditLog
from gateway.settings import ControlMode, ModelSettings
from tests.builders import soon
from tests.conformance.models import REPEAT
from tests.gateway.models.lifecycles import EXPLICIT
from tests.registries import Backends, ScriptedBackend, no_infer, write
from tests.serving import write_model


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


@pytest.fixture
def audit(tmp_path: Path) -> AuditLog:
    return AuditLog(tmp_path / "audit.log")


@asynccontextmanager
async def running(
    models: Path, backend: ScriptedBackend, audit: AuditLog, **options: Any
) -> AsyncIterator[RepositoryControl]:
    settings = ModelSettings(repositories=(models,), **options)
    control = RepositoryControl(ModelRepository((models,)), settings, Backends(backend))
    task = asyncio.create_task(control.run(no_infer, audit=audit))
    await soon(control.registry.wait_settled())
    yield control
    task.cancel()
    with suppress(asyncio.CancelledError):
        await soon(task)


def changes(audit: AuditLog, tmp_path: Path) -> list[tuple[str, ...]]:
    """The lines: by, action, model, result."""
    audit.open()
    audit.close()
    found = map(json.loads, (tmp_path / "audit.log").read_text().splitlines())
    members = ("by", "action", "model", "result")
    return [tuple(each[name] for name in members) for each in found]


async def test_a_poll_has_a_line_for_each_model_that_it_loads_or_unloads(
    tmp_path: Path, models: Path, backend: ScriptedBackend, audit: AuditLog
) -> None:
    write(models, "a", 1)
    write(models, "gone", 1)
    async with running(models, backend, audit, control_mode=ControlMode.POLL) as control:
        await soon(control.poll())
        write(models, "new", 1)
        (models / "a" / "2").mkdir()
        await soon(control.poll())
        (models / "new" / "config.pbtxt").write_text("nonsense")
        shutil.rmtree(models / "gone")
        await soon(control.poll())
    found = changes(audit, tmp_path)
    assert [sorted(found[:2]), sorted(found[2:4]), sorted(found[4:])] == [
        [("server", "load", "a", "ok"), ("server", "load", "gone", "ok")],
        [("server", "load", "a", "ok"), ("server", "load", "new", "ok")],
        [("server", "load", "new", "INVALID_ARG"), ("server", "unload", "gone", "ok")],
    ]


async def test_a_model_that_loads_another_one_is_named_as_the_cause(
    tmp_path: Path, models: Path, backend: ScriptedBackend, audit: AuditLog
) -> None:
    write(models, "a", 1)
    async with running(models, backend, audit, **EXPLICIT) as control:
        for_models = BackendControl(control, audit)
        await soon(for_models.load("a", "", {}))
        await soon(for_models.unload("a", unload_dependents=False))
        with pytest.raises(InferenceError):
            await soon(for_models.load("b", "", {}))
    assert changes(audit, tmp_path) == [
        ("model", "load", "a", "ok"),
        ("model", "unload", "a", "ok"),
        ("model", "load", "b", "INTERNAL"),
    ]


def test_a_program_is_named_as_the_cause_of_its_own_calls(tmp_path: Path, models: Path) -> None:
    write_model(models, "repeat", REPEAT)
    options = {"model_repository": models, "audit_log": tmp_path / "audit.log"}
    with Server(model_control_mode="explicit", **options) as server:
        server.load("repeat")
        server.unload("repeat")
        with pytest.raises(InferenceError):
            server.load("missing")
    assert changes(AuditLog(tmp_path / "audit.log"), tmp_path) == [
        ("program", "load", "repeat", "ok"),
        ("program", "unload", "repeat", "ok"),
        ("program", "load", "missing", "INTERNAL"),
    ]


def test_a_program_whose_server_cannot_open_the_file_gets_an_error(models: Path) -> None:
    server = Server(model_repository=models, audit_log=models)
    with pytest.raises(InferenceError, match=r"cannot start: --audit-log .*: Is a directory"):
        server.start()


@pytest.mark.parametrize("end", [asyncio.CancelledError, RuntimeError])
def test_a_change_without_an_answer_is_aborted(
    tmp_path: Path, audit: AuditLog, end: type[BaseException]
) -> None:
    with pytest.raises(end), audited(audit, "program", "load", "a"):
        raise end
    assert changes(audit, tmp_path) == [("program", "load", "a", "aborted")]
