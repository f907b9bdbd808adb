"""The repository agent `checksum`, and the refusal of others."""

import hashlib
import json
from pathlib import Path

import pytest

from gateway.errors import Code, InferenceError
from gateway.in_process.server import Server
from gateway.models.model_folder import Override
from gateway.models.repository import ModelId, ModelRepository
from tests.builders import add_model

WEIGHTS = b"some weights"
MD5, SHA256 = hashlib.md5(WEIGHTS).hexdigest(), hashlib.sha256(WEIGHTS).hexdigest()


def config(key: str, value: str, agent: str = "checksum") -> str:
    return (
        f"backend: 'identity' model_repository_agents {{ agents {{ name: '{agent}' "
        f"parameters {{ key: '{key}' value: '{value}' }} }} }}"
    )


def written(repository: Path, key: str, value: str, agent: str = "checksum") -> None:
    """A model `m` whose config has one agent with one parameter."""
    folder = add_model(repository, "m", config(key, value, agent))
    (folder / "1/weights").write_bytes(WEIGHTS)


def source_error(repository: Path) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        ModelRepository([repository]).source(ModelId("m"))
    return caught.value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("MD5:1/weights", MD5),
        ("md5:1/weights", MD5.upper()),
        ("SHA256:1/weights", SHA256),
    ],
)
def test_a_model_with_the_right_files_is_read(tmp_path: Path, key: str, value: str) -> None:
    written(tmp_path, key, value)
    assert ModelRepository([tmp_path]).source(ModelId("m")).config.name == "m"


@pytest.mark.parametrize(
    ("key", "value", "code", "message"),
    [
        (
            "MD5:1/weights",
            "0" * 32,
            Code.INVALID_ARG,
            f"Mismatched MD5 hash for file 1/weights, expect: {'0' * 32}, got: {MD5}",
        ),
        (
            "SHA256:1/weights",
            MD5,
            Code.INVALID_ARG,
            f"Mismatched SHA256 hash for file 1/weights, expect: {MD5}, got: {SHA256}",
        ),
        (
            "MD5:1/missing",
            MD5,
            Code.INVALID_ARG,
            "failed to open text file for read 1/missing: No such file or directory",
        ),
        (
            "MD5:1",
            MD5,
            Code.INVALID_ARG,
            "failed to open text file for read 1: Is a directory",
        ),
        ("1/weights", MD5, Code.INVALID_ARG, "failed to parse key: 1/weights"),
        (
            "CRC32:1/weights",
            MD5,
            Code.UNSUPPORTED,
            "Unsupported checksum algorithm: CRC32; expected MD5 or SHA256",
        ),
        *(
            (
                f"MD5:{path}",
                MD5,
                Code.INVALID_ARG,
                f"checksum of file '{path}' of model 'm': it must stay within the model's folder",
            )
            for path in ("../m/1/weights", "/etc/hostname")
        ),
    ],
)
def test_a_model_with_other_files_is_not_read(
    tmp_path: Path, key: str, value: str, code: Code, message: str
) -> None:
    written(tmp_path, key, value)
    error = source_error(tmp_path)
    assert (error.code, error.message) == (code, message)


def test_another_agent_is_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path, "key", "value", agent="decrypt")
    with pytest.raises(InferenceError) as caught:
        ModelRepository([tmp_path]).read("m")
    assert caught.value.code is Code.UNSUPPORTED
    assert "repository agent 'decrypt' of model 'm' is not supported" in caught.value.message


def test_reading_a_config_alone_reads_no_weights(tmp_path: Path) -> None:
    written(tmp_path, "MD5:1/weights", "0" * 32)
    assert ModelRepository([tmp_path]).read("m").backend == "identity"


def test_uploaded_files_are_compared_too(tmp_path: Path) -> None:
    repository = ModelRepository([tmp_path])
    agents = {"agents": [{"name": "checksum", "parameters": {"MD5:1/weights": MD5}}]}
    sent = json.dumps({"backend": "identity", "model_repository_agents": agents})
    right = Override(config=sent, files={"file:1/weights": WEIGHTS})
    source = repository.overridden(ModelId("m"), right)
    assert source.upload is not None
    source.upload.release()
    with pytest.raises(InferenceError, match="Mismatched MD5 hash for file 1/weights"):
        repository.overridden(ModelId("m"), Override(config=sent, files={"file:1/weights": b"x"}))


def test_a_failed_reload_leaves_the_served_model(tmp_path: Path) -> None:
    written(tmp_path, "MD5:1/weights", MD5)
    with Server(model_repository=tmp_path, model_control_mode="explicit") as server:
        server.load("m")
        (tmp_path / "m/1/weights").write_bytes(b"others")
        with pytest.raises(InferenceError, match="Mismatched MD5 hash"):
            server.load("m")
        assert server.model("m").ready()
