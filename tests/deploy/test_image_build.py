"""The image of the target `cpu`: built from Debian's packages by buildah, and started."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import onnx_models
from tests.conformance.models import REPEAT
from tests.deploy.manifests import WRITABLE
from tests.serving import LISTENING, ROOT, STOP_SECS, serving, wait_until, write_model

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]

TOOLS = ("buildah", "mmdebstrap", "chroot", "unshare")
UNUSED = ("doc", "locale", "man")
"""Folders that Debian's slim images lack, too."""
CERTIFICATES = "/etc/ssl/certs"
MOST_MB = 400
IMAGE, BASE = "localhost/sluice:cpu", "localhost/base:bookworm"
START_SECS = 60.0
KSERVE = ("tritonserver", "--model-store=/mnt/models", "--allow-grpc=true", "--allow-http=true")
FREE_PORTS = ("--grpc-port=0", "--http-port=0", "--metrics-port=0")
USER = "1000:1000"
CONTAINER = f"""
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
for each in {" ".join(sorted(WRITABLE))}; do mount -t tmpfs -o mode=1777 tmpfs "$1$each"; done
mount --bind "$2" "$1/models"
root=$1
shift 2
exec {shutil.which("chroot")} --userspec={USER} "$root" "$@"
"""
"""Runs a command in a folder as a container with a read-only root: $1 the folder, $2 models."""
REPEATS, DELAY_SECS = 40, 0.05
ECHO = """
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        found = [pb.get_input_tensor_by_name(each, "IN").as_numpy() for each in requests]
        return [pb.InferenceResponse([pb.Tensor("OUT", each)]) for each in found]
"""
ECHO_CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
"""


@dataclass(frozen=True)
class Image:
    """An image whose files are below `root`, and its configuration."""

    root: Path
    config: dict[str, Any]
    size: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a container, whose user has no entry in /etc/passwd."""
        return {"HOME": "/"} | dict(each.split("=", 1) for each in self.config["Env"])


class Container(subprocess.Popen[str]):
    """A command as process 1 of namespaces of its own; signals go to it."""

    def __init__(self, image: Image, models: Path, arguments: Sequence[str]) -> None:
        apart = ("unshare", "--mount", "--pid", "--fork", "sh", "-ec", CONTAINER, "sh")
        super().__init__(
            [*apart, str(image.root), str(models), *image.config["Entrypoint"], *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=image.environment,
        )

    def send_signal(self, number: int) -> None:
        """Send a signal to process 1, if there is one."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        for each in children.read_text().split() if self.poll() is None else ():
            os.kill(int(each), number)


class Builder:
    """buildah with a store of its own in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._policy = folder / "policy.json"
        self._policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')

    def run(self, command: str, *arguments: str) -> str:
        """The output of a command; AssertionError with its log if it fails."""
        store = ("--root", self._folder / "root", "--runroot", self._folder / "runroot")
        signed = (
            ("--signature-policy", self._policy) if command in ("bud", "from", "commit") else ()
        )
        done = subprocess.run(
            ["buildah", *store, "--storage-driver", "vfs", command, *signed, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout.strip()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The image of the repository as it is."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid():
        pytest.skip(f"needs root, and {', '.join(TOOLS)} (apt-get install buildah mmdebstrap)")
    folder = tmp_path_factory.mktemp("images")
    try:
        yield built(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def built(folder: Path) -> Image:
    builder, archive = Builder(folder), folder / "base.tar"
    packages = "--include=python3,python3-venv,ca-certificates"
    bootstrap = ["mmdebstrap", "--mode=root", "--variant=minbase", packages, "--quiet"]
    without = [f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in UNUSED]
    subprocess.run([*bootstrap, *without, "bookworm", str(archive)], check=True)
    base = builder.run("from", "scratch")
    builder.run("add", base, str(archive), "/")
    builder.run("commit", base, BASE)
    source = ("-f", "deploy/Containerfile", "--target=cpu", f"--build-arg=BASE={BASE}")
    trusted = f"--volume={CERTIFICATES}:{CERTIFICATES}:ro"
    builder.run("bud", "--isolation=chroot", trusted, *source, "-t", IMAGE, ".")
    container = builder.run("from", "--pull-never", IMAGE)
    config = json.loads(builder.run("inspect", "--type=image", IMAGE))["OCIv1"]["config"]
    [found] = json.loads(builder.run("images", "--json", IMAGE))
    return Image(Path(builder.run("mount", container)), config, found["size"])


def test_the_image_is_smaller_than_400_mb(image: Image) -> None:
    size, unit = image.size.split()
    assert unit == "MB"
    assert float(size) < MOST_MB


def test_a_container_starts_and_stops_the_server_without_rights(image: Image) -> None:
    config = image.config
    assert (config["User"], config["StopSignal"]) == ("1000", "SIGTERM")
    assert (config["Entrypoint"], config["Cmd"][0]) == (["sluice"], "serve")


def test_the_image_serves_a_model_with_the_arguments_of_kserve(
    image: Image, tmp_path: Path
) -> None:
    version = image.root / "mnt/models/1"
    version.mkdir(parents=True)
    onnx_models.save(onnx_models.add_sub(), version)
    log = tmp_path / "log"
    inside = [shutil.which("chroot") or "", f"--userspec={USER}", str(image.root)]
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*inside, *image.config["Entrypoint"], *KSERVE, *FREE_PORTS],
            env={**image.environment, "MODEL_NAME": "served"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: "Started HTTPService" in log.read_text(), "it is ready", START_SECS)
        port = dict(LISTENING.findall(log.read_text()))["http"]
        found = httpx.get(f"http://127.0.0.1:{port}/v2/models/served/config").json()
        assert found["backend"] == "onnxruntime"
        assert httpx.get(f"http://127.0.0.1:{port}/v2/models/served/ready").status_code == 200
        server.terminate()
        assert server.wait(STOP_SECS) == 0
    finally:
        server.kill()
    assert not re.search(r"^E\d{4} |Traceback", log.read_text(), re.MULTILINE)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A repository with models of three backends."""
    repository = tmp_path / "models"
    write_model(repository, "repeat", REPEAT)
    write_model(repository, "echo", ECHO_CONFIG)
    (repository / "echo" / "1" / "model.py").write_text(ECHO)
    onnx_models.write(repository, "add_sub", onnx_models.add_sub())
    return repository


def test_a_container_with_a_read_only_root_serves_and_drains_at_sigterm(
    image: Image, models: Path
) -> None:
    def start(arguments: Sequence[str], _: Mapping[str, str]) -> Container:
        return Container(image, models, arguments)

    flags = ("--exit-timeout-secs=20", "--trace-config=mode=opentelemetry")
    with serving("/models", *flags, start=start) as server:
        echo = {"name": "IN", "datatype": "INT32", "shape": [1], "data": [7]}
        url = f"{server.http}/v2/models/echo"
        (output,) = httpx.post(f"{url}/infer", json={"inputs": [echo]}).json()["outputs"]
        assert output["data"] == [7]
        labels = f"{server.http}/v2/repository/models/echo/labels"
        assert httpx.post(labels, json={"labels": {"champion": 1}}).status_code == 200
        body = {"text_input": "a", "n": REPEATS, "delay_us": int(DELAY_SECS * 1e6)}
        repeat = f"{server.http}/v2/models/repeat/generate_stream"
        with httpx.stream("POST", repeat, json=body) as answer:
            events = answer.iter_lines()
            next(events)
            server.begin_stop(signal.SIGTERM)
            assert sum(line.startswith("data:") for line in events) == REPEATS - 1
        assert server.wait_ended() == 0
    assert not re.search(r"^E\d{4} |Traceback", server.text, re.MULTILINE)
