"""Loads of Python models in real workers, their limits and their end."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from backends.python import backend as module
from backends.python.backend import PythonBackend
from backends.python.environments import Places, WorkerEnvironment
from gateway.backend import ModelContext
from gateway.config import (
    ModelConfig,
)
from gateway.errors import Code, InferenceError
from tests.backends.python.loading import (
    ASK,
    CONFIG,
    TWICE,
    Load,
    answers,
    no_model,
    request,
    soon,
    told,
    values,
    write,
)
from tests.builders import death_of
from tests.serving import wait_until


async def test_a_worker_keeps_to_its_cores(load: Load) -> None:
    core = max(os.sched_getaffinity(0))
    instance = await load(
        """
    def execute(self, requests):
        found = []
        thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        cores = sorted(os.sched_getaffinity(0) | found[0])
        return [response(np.array(cores, np.float32)) for _ in requests]
""",
        cpu_cores=frozenset({core}),
    )
    (answer,) = await answers(instance, request(1))
    assert values(answer) == [core]


async def test_a_close_that_is_cancelled_still_ends_its_worker(load: Load, tmp_path: Path) -> None:
    instance = await load("""
    def execute(self, requests):
        return [None]

    def finalize(self):
        (HERE / "finalizing").write_text("")
        time.sleep(60)
    """)
    closing = asyncio.create_task(instance.close())
    finalizing = tmp_path / "m" / "1" / "finalizing"
    await asyncio.to_thread(wait_until, finalizing.exists, "it finalizes")
    assert not instance.alive
    closing.cancel()
    await soon(asyncio.wait([closing]))
    assert "was stopped" in await soon(death_of(instance))


async def test_finalize_is_called_once_and_its_failure_is_logged(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    instance = await load("""
    def execute(self, requests):
        pass

    def finalize(self):
        with open(HERE / "finalized", "a") as file:
            file.write("once")
        raise ValueError("too late")
""")
    await soon(instance.close())
    assert (tmp_path / "m" / "1" / "finalized").read_text() == "once"
    assert "finalize failed" in caplog.text


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        (
            "return False",
            Code.UNAVAILABLE,
            "Model 'm_0_0' is not ready (user-defined check failed).",
        ),
        ("return 1", Code.INTERNAL, "is_ready() must return a boolean value"),
        ("raise ValueError('sick')", Code.INTERNAL, "ValueError: sick"),
    ],
)
async def test_a_model_may_say_that_it_is_not_ready(
    load: Load, body: str, code: Code, text: str
) -> None:
    instance = await load(f"{TWICE}\n    def is_ready(self):\n        {body}\n")
    with pytest.raises(InferenceError) as refused:
        await soon(instance.check_ready())
    assert refused.value.code is code
    assert text in refused.value.message
    assert await answers(instance, request(1))


async def test_concurrent_checks_share_one_call(load: Load, tmp_path: Path) -> None:
    instance = await load(f"""{TWICE}
    def is_ready(self):
        with open(HERE / "asked", "a") as file:
            file.write("x")
        time.sleep(0.3)
        return True
""")
    await soon(asyncio.gather(*(instance.check_ready() for _ in range(5))))
    assert (tmp_path / "m" / "1" / "asked").read_text() == "x"
    await soon(instance.check_ready())
    assert (tmp_path / "m" / "1" / "asked").read_text() == "xx"


async def test_a_model_without_a_check_is_ready(load: Load) -> None:
    await soon((await load(TWICE)).check_ready())


COMPLETES = """
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(8)
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [1]})
        return config

    def execute(self, requests):
        pass
"""


async def test_a_model_completes_its_config(tmp_path: Path) -> None:
    folder = write(tmp_path, COMPLETES)
    config = ModelConfig(name="m", backend="python")
    found = await soon(asyncio.to_thread(PythonBackend().complete, config, folder))
    assert found.max_batch_size == 8
    assert [each.name for each in found.output] == ["y"]


async def test_a_model_that_completes_nothing_keeps_its_config(tmp_path: Path) -> None:
    folder = write(tmp_path, TWICE)
    assert await soon(asyncio.to_thread(PythonBackend().complete, CONFIG, folder)) == CONFIG


@pytest.mark.parametrize(("limit", "own"), [(0.5, "600"), (600, "0.5"), (0.5, "0")])
async def test_completing_a_config_may_not_take_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float, own: str
) -> None:
    monkeypatch.setattr(module, "COMPLETE_SECS", limit)
    folder = write(tmp_path, COMPLETES.replace("return config", "time.sleep(600)"))
    config = ModelConfig(name="m", backend="python", parameters={"initialize_timeout_secs": own})
    with pytest.raises(InferenceError, match=r"did not return within 0\.5 s"):
        await soon(asyncio.to_thread(PythonBackend().complete, config, folder))


async def test_initialize_gets_tritons_arguments(load: Load) -> None:
    instance = await load(f"""
    def initialize(self, args):
        self.args = args
{ASK.split("        found")[0]}
        return [response(x(request), parameters={{"told": json.dumps(self.args)}})]
""")
    found = await told(instance, request(1))
    for text in (
        '"model_instance_name": "m_0_0"',
        '"model_instance_kind": "AUTO"',
        '"model_instance_device_id": "0"',
        '"model_version": "1"',
        '"model_name": "m"',
    ):
        assert text in found


async def test_a_worker_that_does_not_start_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, TWICE)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(module, "interpreter", always(WorkerEnvironment(python=python)))
    backend = PythonBackend()
    backend.settings = {"stub-timeout-seconds": "1"}
    context = ModelContext(
        config=CONFIG, path=folder, store=tmp_path, infer=no_model, wasted=lambda _: None
    )
    with pytest.raises(InferenceError, match="did not start within 1 s"):
        await soon(backend.load(context))


async def test_an_interpreter_that_cannot_be_started_is_reported_without_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, TWICE)
    nothing = WorkerEnvironment(python=tmp_path / "nothing")
    monkeypatch.setattr(module, "interpreter", always(nothing))
    with pytest.raises(InferenceError) as refused:
        await soon(asyncio.to_thread(PythonBackend().complete, CONFIG, folder))
    assert refused.value.message == (
        "the worker of model 'm' cannot be started: No such file or directory"
    )


def always(environment: WorkerEnvironment) -> Callable[..., Awaitable[WorkerEnvironment]]:
    async def found(config: ModelConfig, places: Places) -> WorkerEnvironment:
        return environment

    return found


async def test_a_load_that_is_cancelled_leaves_no_process(load: Load, tmp_path: Path) -> None:
    loading = asyncio.ensure_future(load(SLOW))
    pid = await soon(asyncio.to_thread(written, tmp_path / "m" / "1" / "pid"))
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(loading)
    assert pid not in os.listdir("/proc")


SLOW = """
    def initialize(self, args):
        (HERE / "pid").write_text(str(os.getpid()))
        time.sleep(600)
"""


def written(path: Path) -> str:
    """The text that a worker writes into a file, once it has."""
    wait_until(lambda: path.exists() and bool(path.read_text()), f"{path.name} is written")
    return path.read_text()


async def test_initialize_may_have_a_limit_of_time(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "REMIND_SECS", 0.1)
    config = replace(CONFIG, parameters={"initialize_timeout_secs": "0.5"})
    with pytest.raises(InferenceError, match=r"'m_0_0' did not initialize within 0.5 s"):
        await load("    def initialize(self, args):\n        time.sleep(600)\n", config)
    assert "model still initializing" in caplog.text
