"""A cache on a disk that is full, or read-only: real file systems, in the server's own mounts."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import httpx
import pytest

from gateway.cli import main
from tests.conformance.models import identity
from tests.e2e.object_storage.clouds import Bucket
from tests.needs import PREFIX
from tests.serving import ROOT, WAIT_SECS, Serving, running

pytestmark = pytest.mark.own_models("the repository")

UNSHARE = ("unshare", "--mount", "--map-root-user")
SMALL = 'mount -t tmpfs -o size=4m tmpfs "$0"'
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"'
LARGE = bytes(6 << 20)
FLAGS = ("--model-control-mode=explicit", "--repository-settle-secs=0")
MODELS = ("m", "neighbour")
INPUT = {"name": "INPUT", "shape": [1], "datatype": "INT32", "data": [7]}


@pytest.fixture(scope="module", autouse=True)
def mounts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip the tests on a machine on which this user may mount nothing."""
    place = tmp_path_factory.mktemp("place")
    try:
        done = subprocess.run([*UNSHARE, "sh", "-c", SMALL, place], check=False)
    except FileNotFoundError:
        done = None
    if done is None or done.returncode:
        pytest.skip(f"{PREFIX}permission to mount: run as root, or allow user namespaces")


@pytest.fixture
def address(s3_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A repository of two small models; its cache is the folder `cache`."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))
    for name, value in s3_bucket.environment.items():
        monkeypatch.setenv(name, value)
    for name in MODELS:
        s3_bucket.put(f"models/{name}/config.pbtxt", identity("INT32").encode())
        s3_bucket.put(f"models/{name}/1/weights", b"1")
    return f"{s3_bucket.address}/models"


def mounted(
    mount: str, folder: Path, args: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Start `python -m gateway`; only this process has the mount, which ends with it."""
    command = (*UNSHARE, "sh", "-c", f'{mount} && exec "$@"', str(folder))
    return subprocess.Popen(
        [*command, sys.executable, "-m", "gateway", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=dict(environment),
    )


def started(mount: str, tmp_path: Path, address: str, *flags: str) -> Serving:
    start: Callable[..., subprocess.Popen[str]] = partial(mounted, mount, tmp_path / "cache")
    loads = (f"--load-model={name}" for name in MODELS)
    return Serving(address, (*FLAGS, *loads, *flags), start=start)


def load(server: Serving, model: str) -> str:
    """Load a model; the error, "" without one."""
    url = f"{server.http}/v2/repository/models/{model}/load"
    found = httpx.post(url, json={}, timeout=WAIT_SECS)
    return "" if found.is_success else str(found.json()["error"])


def version_of(server: Serving, model: str) -> str:
    """The version that answers."""
    url = f"{server.http}/v2/models/{model}/infer"
    found = httpx.post(url, json={"inputs": [INPUT]}, timeout=WAIT_SECS).json()
    assert found["outputs"][0]["data"] == [7]
    return str(found["model_version"])


@pytest.mark.parametrize(
    ("size", "error"),
    [
        ("1GiB", "needs 0.0 GiB more, the disk of the cache has 0.0 GiB left"),
        ("0", "no space is left on the disk of the cache: make some"),
    ],
    ids=["bounded", "unbounded"],
)
def test_a_full_disk_fails_a_load_and_the_version_before_answers(
    address: str, s3_bucket: Bucket, tmp_path: Path, size: str, error: str
) -> None:
    small = started(SMALL, tmp_path, address, f"--remote-cache-size={size}")
    with running(small) as server:
        for key in ("m/2/weights", "large/1/weights"):
            s3_bucket.put(f"models/{key}", LARGE)
        s3_bucket.put("models/large/config.pbtxt", identity("INT32").encode())
        for name in ("m", "large"):
            found = load(server, name)
            assert error in found
            assert str(tmp_path) not in found
            assert [version_of(server, each) for each in MODELS] == ["1", "1"]
        s3_bucket.put("models/m/2/weights", LARGE[: 2 << 20])
        assert load(server, "m") == ""
        assert [version_of(server, each) for each in MODELS] == ["2", "1"]


def test_a_read_only_cache_serves_what_it_has(
    address: str, s3_bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["fetch", "--repository-settle-secs=0", address])
    assert "neighbour 1" in capsys.readouterr().out
    with running(started(READ_ONLY, tmp_path, address)) as server:
        assert [version_of(server, each) for each in MODELS] == ["1", "1"]
        s3_bucket.put("models/m/2/weights", b"2")
        assert "no permission to write into the cache: grant it" in load(server, "m")
        assert [version_of(server, each) for each in MODELS] == ["1", "1"]
        assert load(server, "neighbour") == ""
