"""The image of the target `cpu`: built from Debian's packages by buildah, and started."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.onnx_models import add_sub, save
from tests.serving import LISTENING, ROOT, STOP_SECS, wait_until

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]

TOOLS = ("buildah", "mmdebstrap", "chroot")
UNUSED = ("doc", "locale", "man")
"""Folders that Debian's slim images lack, too."""
CERTIFICATES = "/etc/ssl/certs"
MOST_MB = 400
IMAGE, BASE = "localhost/sluice:cpu", "localhost/base:bookworm"
START_SECS = 60.0
KSERVE = ("tritonserver", "--model-store=/mnt/models", "--allow-grpc=true", "--allow-http=true")
FREE_PORTS = ("--grpc-port=0", "--http-port=0", "--metrics-port=0")


@dataclass(frozen=True)
class Image:
    """An image whose files are below `root`, and its configuration."""

    root: Path
    config: dict[str, Any]
    size: str


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
    save(add_sub(), version)
    log = tmp_path / "log"
    environment = dict(each.split("=", 1) for each in image.config["Env"])
    inside = [shutil.which("chroot") or "", "--userspec=1000:1000", str(image.root)]
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*inside, *image.config["Entrypoint"], *KSERVE, *FREE_PORTS],
            env={**environment, "MODEL_NAME": "served"},
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
