"""A server that is started with the arguments of a tritonserver, as KServe gives them."""

from pathlib import Path

from tests.conformance.models import identity
from tests.serving import http_get, serving, write_model


def test_a_server_with_tritons_arguments_logs_those_without_effect(tmp_path: Path) -> None:
    write_model(tmp_path, "add", identity("FP32", "1"))
    arguments = (f"--model-store={tmp_path}", "--allow-grpc=True", "--allow-http", "true")
    only_tritons = ("--reuse-http-port", "true", "--repoagent-directory=/opt", "--htp-port=1")
    with serving(tmp_path, *arguments, *only_tritons, command=("tritonserver",)) as server:
        assert http_get(server.ports["http"], "/v2/models/add/ready")[0] == 200
    for option in ("--reuse-http-port", "--repoagent-directory", "--htp-port"):
        assert f"option ignored option={option} why=" in server.text
    assert "did you mean --http-port?" in server.text
    assert "/opt" not in server.text
