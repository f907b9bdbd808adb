"""Two servers on one cache evict: never what either of them has loaded, and never half a model."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from gateway.storage.mirror.blobs import Blobs
from gateway.storage.mirror.cache import RemoteCache
from tests.conformance.models import identity
from tests.e2e.object_storage.clouds import Bucket
from tests.serving import WAIT_SECS, Serving, serving, wait_until

KIB = 1024
SIZE = 400 * KIB
MODELS = "abcdef"
ROUNDS = 4
INPUT = {"name": "INPUT", "shape": [1], "datatype": "INT32", "data": [7]}


@pytest.fixture
def address(s3_bucket: Bucket) -> str:
    """A repository of six models of 400 KiB."""
    for name in MODELS:
        s3_bucket.put(f"models/{name}/config.pbtxt", identity("INT32").encode())
        s3_bucket.put(f"models/{name}/1/weights", content(name))
    return f"{s3_bucket.address}/models"


@pytest.fixture
def pair(
    address: str, s3_bucket: Bucket, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[list[Serving]]:
    """Two servers without models, on one cache with room for that many of them."""
    flags = (
        *("--model-control-mode=explicit", "--repository-settle-secs=0"),
        f"--remote-cache-size={request.param * SIZE + 50 * KIB}",
    )
    environment = {**s3_bucket.environment, "SLUICE_CACHE": str(tmp_path / "cache")}
    with ExitStack() as stack:
        yield [stack.enter_context(serving(address, *flags, environment=environment)) for _ in "12"]


def content(name: str) -> bytes:
    return name.encode() * SIZE


def change(server: Serving, model: str, action: str) -> str:
    """Load or unload a model; the error, "" without one."""
    url = f"{server.http}/v2/repository/models/{model}/{action}"
    found = httpx.post(url, json={}, timeout=WAIT_SECS)
    return "" if found.is_success else str(found.json()["error"])


def answers(server: Serving, model: str) -> bool:
    url = f"{server.http}/v2/models/{model}/infer"
    found = httpx.post(url, json={"inputs": [INPUT]}, timeout=WAIT_SECS)
    return found.is_success and found.json()["outputs"][0]["data"] == [7]


def cached(root: Path) -> dict[str, bool]:
    """The models of the cache, and whether a server uses them; the used ones are whole."""
    found = {}
    for tree in RemoteCache(root).list():
        name = tree.address[-1]
        found[name] = tree.in_use
        if tree.in_use:
            (file,) = root.glob(f"trees/*/{name}/*/1/weights")
            assert file.read_bytes() == content(name)
    return found


@pytest.mark.own_models("loads and unloads")
@pytest.mark.parametrize("pair", [2], indirect=True)
def test_a_server_evicts_what_another_one_has_unloaded_and_nothing_that_it_uses(
    pair: list[Serving], tmp_path: Path
) -> None:
    first, second, root = *pair, tmp_path / "cache" / "remote"
    assert (change(first, "a", "load"), change(second, "b", "load")) == ("", "")
    assert "model 'c' needs" in change(first, "c", "load")
    assert "model 'd' needs" in change(second, "d", "load")
    assert [answers(first, "a"), answers(second, "b")] == [True, True]
    assert {name for name, used in cached(root).items() if used} == {"a", "b"}
    assert change(second, "b", "unload") == ""
    wait_until(lambda: not cached(root)["b"], "the second server does not use b")
    assert change(first, "c", "load") == ""
    assert cached(root).items() >= {"a": True, "c": True}.items()
    assert "b" not in cached(root)
    assert "model 'b' needs" in change(second, "b", "load")
    assert change(second, "a", "load") == ""  # from the files of the first
    assert [answers(first, "a"), answers(first, "c"), answers(second, "a")] == [True] * 3


@pytest.mark.own_models("loads and unloads")
@pytest.mark.parametrize("pair", [5], indirect=True)
def test_two_servers_that_load_and_evict_at_once_keep_what_each_uses(
    pair: list[Serving], tmp_path: Path
) -> None:
    first, root = pair[0], tmp_path / "cache" / "remote"
    assert change(first, "a", "load") == ""

    def turn(server: Serving, names: str) -> None:
        for name in names * ROUNDS:
            assert change(server, name, "load") == ""
            assert answers(server, name)
            assert answers(first, "a")
            assert change(server, name, "unload") == ""

    with ThreadPoolExecutor() as threads:
        list(threads.map(turn, pair, ("bcd", "efd")))
    assert cached(root)["a"]
    assert sum(Blobs(root).sizes().values()) <= 5 * SIZE + 50 * KIB
    assert list(RemoteCache(root).damaged()) == []
    assert answers(first, "a")
