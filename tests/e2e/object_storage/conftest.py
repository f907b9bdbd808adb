"""Emulators of three clouds, each started by its first test, and a proxy before that of S3."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from tests.e2e.object_storage.clouds import CLOUDS, Bucket, MakeBucket
from tests.e2e.object_storage.faulty_proxy import FaultyProxy


@pytest.fixture(scope="session")
def started() -> Iterator[Callable[[str], MakeBucket]]:
    """The emulator of a cloud, by its scheme."""
    running: dict[str, MakeBucket] = {}
    with ExitStack() as stack:

        def start(scheme: str) -> MakeBucket:
            if scheme not in running:
                running[scheme] = stack.enter_context(CLOUDS[scheme]())
            return running[scheme]

        yield start


@pytest.fixture(params=[*CLOUDS])
def cloud_bucket(request: pytest.FixtureRequest, started: Callable[[str], MakeBucket]) -> Bucket:
    """A new bucket, at each of the clouds."""
    return started(request.param)()


@pytest.fixture
def s3_bucket(started: Callable[[str], MakeBucket]) -> Bucket:
    """A new bucket of S3."""
    return started("s3")()


@pytest.fixture
def azure_bucket(started: Callable[[str], MakeBucket]) -> Bucket:
    """A new container of Azure."""
    return started("as")()


@pytest.fixture
def proxy(s3_bucket: Bucket) -> Iterator[FaultyProxy]:
    """A proxy before the storage of `s3_bucket`."""
    with FaultyProxy(s3_bucket.url).running() as running:
        yield running


@pytest.fixture
def proxied_bucket(s3_bucket: Bucket, proxy: FaultyProxy) -> Bucket:
    """`s3_bucket` behind the proxy; changes of its objects do not pass it."""
    return replace(s3_bucket, address=s3_bucket.address.replace(s3_bucket.url, proxy.url))
