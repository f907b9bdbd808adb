"""Addresses, sizes and folders of repositories in object storage."""

import argparse
from pathlib import Path

import pytest

from gateway.errors import InferenceError
from gateway.flags import models, ray_fleet, remote, serve
from gateway.settings import ModelSettings
from gateway.storage.mirror.settings import CacheBound, RemoteRepository

ADDRESS = "s3://http://127.0.0.1:5000/bucket/models"


def parse(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> ModelSettings:
    monkeypatch.setenv("SLUICE_CACHE", "/cache")
    parser = argparse.ArgumentParser(exit_on_error=False)
    models.add_flags(parser)
    return models.model_settings(parser.parse_args(arguments))


def test_addresses_and_folders_are_repositories(monkeypatch: pytest.MonkeyPatch) -> None:
    repositories = parse(
        monkeypatch,
        f"--model-repository={ADDRESS}",
        "--model-repository=folder",
        "--remote-cache-size=500GiB",
        "--repository-settle-secs=0",
        "--remote-offline=true",
    ).repositories
    remote_one = RemoteRepository(
        address=ADDRESS,
        root=Path("/cache/remote"),
        bound=CacheBound(500 << 30),
        settle_secs=0,
        offline=True,
    )
    assert repositories == (remote_one, Path("folder"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80%", CacheBound(80, is_percentage=True)),
        ("100%", CacheBound(100, is_percentage=True)),
        ("0", CacheBound(0)),
        ("1000", CacheBound(1000)),
        ("3MiB", CacheBound(3 << 20)),
    ],
)
def test_a_bound_is_a_size_or_a_percentage(text: str, expected: CacheBound) -> None:
    assert remote.bound(text) == expected


@pytest.mark.parametrize("text", ["", "101%", "-1", "3GB", "1.5GiB", "all"])
def test_another_bound_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected such as 80%, 500GiB or 0"):
        remote.bound(text)


@pytest.mark.parametrize("text", ["s3://", "gs://", "as://account"])
def test_an_address_without_a_bucket_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        remote.place(text)


@pytest.mark.parametrize("scheme", remote.MOUNTS)
def test_the_folder_of_tritons_variable_has_the_cache(scheme: str) -> None:
    environment = {remote.MOUNTS[scheme]: "/mount", "SLUICE_CACHE": "/cache"}
    assert remote.cache_root(scheme, environment) == Path("/mount")
    others = {"SLUICE_CACHE": "/cache", "XDG_CACHE_HOME": "/xdg"}
    assert remote.cache_root(scheme, others) == Path("/cache/remote")


def test_a_fleet_on_ray_takes_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_fleet, "require_ray", lambda: None)
    parser = argparse.ArgumentParser()
    serve.add_flags(parser)
    flags = parser.parse_args([f"--model-repository={ADDRESS}", "--fleet=ray"])
    with pytest.raises(InferenceError, match="expected a folder with --fleet ray"):
        ray_fleet.replica_options(flags)
