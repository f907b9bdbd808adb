"""Models in object storage: downloads, starts, polls and single versions."""

import argparse
import http.client
import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from loadtests.start import CONFIG, MODEL, POLL_SECS
from loadtests.support.findings import Finding
from loadtests.support.http_client import call
from loadtests.support.object_store import CONTINUED, LISTED, object_store, taken
from loadtests.support.results import Line, Results
from loadtests.support.servers import (
    GATEWAY,
    LOGS,
    Contender,
    Cpus,
    Launch,
    LoadTestFailed,
    Server,
    gateway,
    read_proc,
    resident_bytes,
    serving,
)

MIB = 2**20
FILES = 8
BUCKET = "bucket"
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
PEER, LOCAL = "boto3", "local folder"
SETTLED_SECS = 3600
"""The age of every object: no change waits until it is settled."""
EXPLICIT = "--model-control-mode=explicit"
POLL = ("--model-control-mode=poll", "--repository-poll-secs=1")
POLLED_SECS = 10.0
POLLED_MODELS, POLLED_FILES = 50, 20
VERSION_BYTES = 16 * MIB
ALL_VERSIONS = "version_policy { all {} }\n"
WAIT_SECS = 60.0

DOWNLOAD = Line("first download", "MiB")
START = Line(f"start with {MODEL}", "start")
STARTS = 3
"""Starts of each kind in a round: one takes 0.4 s, and some take twice as long."""


def download(
    asked: argparse.Namespace, folder: Path, _: Console, results: Results
) -> Sequence[Finding]:
    """A model's first download against boto3's, and the second start against a local folder."""
    bucket = folder / BUCKET
    for number in range(FILES):
        write_object(bucket / MODEL / "1" / f"part-{number}", asked.size_mib * MIB // FILES)
    write_object(bucket / MODEL / "config.pbtxt", content=CONFIG)
    memory, counted = [], Counter[str]()
    with serving(object_store(folder), asked.server_cpus) as storage:
        for turn in range(asked.rounds):
            shutil.rmtree(folder / "cache", ignore_errors=True)
            sides = (_by_boto3, _by_gateway)
            for side in sides[:: 1 if turn % 2 else -1]:
                name, secs, grown = side(storage, folder, asked)
                results.add(name, {DOWNLOAD.rate: asked.size_mib / secs})
                memory.append(grown)
            taken(storage)
            remote = _gateway(storage, folder)
            for _ in range(STARTS):
                counted = _start(remote, asked.server_cpus, storage, results)
                _start(gateway(bucket, LOCAL), asked.server_cpus, storage, results)
    until_ready = START.lower("until ready", "s")
    faster = results.ratio(DOWNLOAD.rate, GATEWAY, PEER) or 0.0
    slower = results.ratio(until_ready, GATEWAY, LOCAL) or 0.0
    results.add(GATEWAY, {DOWNLOAD.lower("memory above idle", "MiB"): max(memory)})
    return [
        Finding(figure="MiB/s over boto3's", value=faster, least=2),
        Finding(figure="memory above idle", value=max(memory), unit="MiB", most=400),
        Finding(figure="second start: objects read", value=len(_objects(counted)), most=0),
        Finding(figure="second start: listings", value=counted[LISTED], most=1),
        Finding(figure="second start over that of a local folder", value=slower, most=1.1),
    ]


def poll(
    asked: argparse.Namespace, folder: Path, _: Console, results: Results
) -> Sequence[Finding]:
    """The requests of a poll of many small models."""
    for model in range(POLLED_MODELS):
        write_object(folder / BUCKET / f"m{model}" / "config.pbtxt", content=CONFIG)
        for number in range(POLLED_FILES - 1):
            write_object(folder / BUCKET / f"m{model}" / "1" / f"{number}", 100)
    with serving(object_store(folder), asked.server_cpus) as storage:
        contender = _gateway(storage, folder, *POLL)
        with serving(contender.launch(), asked.server_cpus):
            taken(storage)
            time.sleep(POLLED_SECS)
            counted = taken(storage)
    line = Line(f"poll of {POLLED_MODELS} models of {POLLED_FILES} files", "poll")
    per_poll = (counted[LISTED] + counted[CONTINUED]) / counted[LISTED]
    results.add(GATEWAY, {line.lower("requests", "per poll"): per_poll})
    return [
        Finding(figure="requests of a poll", value=per_poll, most=1),
        Finding(figure="objects read", value=len(_objects(counted)), most=0),
    ]


def version(
    asked: argparse.Namespace, folder: Path, _: Console, results: Results
) -> Sequence[Finding]:
    """A fourth version of a model with three."""
    bucket = folder / BUCKET
    write_object(bucket / MODEL / "config.pbtxt", content=CONFIG + ALL_VERSIONS)
    for number in (1, 2, 3):
        write_object(bucket / MODEL / f"{number}" / "weights", VERSION_BYTES)
    with serving(object_store(folder), asked.server_cpus) as storage:
        contender = _gateway(storage, folder, *POLL)
        with serving(contender.launch(), asked.server_cpus) as server:
            taken(storage)
            loads = _loads(server)
            write_object(bucket / MODEL / "4" / "weights", VERSION_BYTES)
            began = time.perf_counter()
            _wait_ready(server, f"/v2/models/{MODEL}/versions/4/ready")
            took = time.perf_counter() - began
            counted, loads = taken(storage), _loads(server) - loads
    own = f"{BUCKET}/{MODEL}/4/weights"
    others = sum(size for path, size in _objects(counted).items() if path != own)
    line = Line("version 4 of a model with three", "load")
    results.add(GATEWAY, {line.lower("until ready", "s"): took})
    return [
        Finding(figure="loads", value=loads, least=1, most=1),
        Finding(figure="bytes of its own", value=counted[own], least=VERSION_BYTES),
        Finding(figure="bytes of others", value=others, most=0),
        Finding(figure="until ready", value=took, unit="s"),
    ]


def write_object(path: Path, size: int = 0, content: str = "") -> None:
    """A file of the bucket that is old enough to be settled; without content it is sparse."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    if size:
        os.truncate(path, size)
    old = time.time() - SETTLED_SECS
    os.utime(path, (old, old))


def _gateway(storage: Server, folder: Path, *flags: str) -> Contender:
    """A gateway whose repository is the bucket, and whose cache is in the folder."""
    address = f"s3://http://127.0.0.1:{storage.ports.http}/{BUCKET}"
    variables = {**KEYS, "SLUICE_CACHE": str(folder / "cache")}
    plain = gateway(address, GATEWAY, *flags)
    words = [f"{name}={value}" for name, value in variables.items()]

    def launch() -> Launch:
        found = plain.launch()
        return replace(found, command=["/usr/bin/env", *words, *found.command])

    return Contender(GATEWAY, launch)


def _by_gateway(
    storage: Server, folder: Path, asked: argparse.Namespace
) -> tuple[str, float, float]:
    """The seconds of a load with its download, and how much memory it takes at most, in MiB."""
    with serving(_gateway(storage, folder, EXPLICIT).launch(), asked.server_cpus) as server:
        idle = resident_bytes(server.pid)
        _use_memory(folder, asked.size_mib)
        began = time.perf_counter()
        call(server.ports.http, f"/v2/repository/models/{MODEL}/load", {})
        took = time.perf_counter() - began
        return GATEWAY, took, (_peak_bytes(server.pid) - idle) / MIB


def _by_boto3(storage: Server, folder: Path, asked: argparse.Namespace) -> tuple[str, float, float]:
    """The seconds of `download_file` for one file after the other."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{storage.ports.http}",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    )
    target = folder / "boto3"
    target.mkdir()
    _use_memory(folder, asked.size_mib)
    began = time.perf_counter()
    for number in range(FILES):
        name = f"part-{number}"
        client.download_file(BUCKET, f"{MODEL}/1/{name}", str(target / name))
    took = time.perf_counter() - began
    shutil.rmtree(target)
    return PEER, took, 0.0


def _use_memory(folder: Path, size_mib: int) -> None:
    """Write and delete as much as a download writes, before each one.

    A virtual machine gets memory from its host at the first use, and gives it back when it is free:
    with memory that was not used before, the download that comes first takes up to twice as long.
    """
    path, content = folder / "memory", bytes(MIB)
    with path.open("wb", buffering=0) as file:
        for _ in range(size_mib):
            file.write(content)
    path.unlink()


def _start(contender: Contender, cpus: Cpus, storage: Server, results: Results) -> Counter[str]:
    """The requests of a start until it is ready."""
    launch = replace(contender.launch(), poll_secs=POLL_SECS)
    began = time.perf_counter()
    with serving(launch, cpus):
        took = time.perf_counter() - began
    results.add(contender.name, {START.lower("until ready", "s"): took})
    return taken(storage)


def _objects(counted: Mapping[str, int]) -> dict[str, int]:
    return {path: size for path, size in counted.items() if path not in (LISTED, CONTINUED)}


def _peak_bytes(pid: int) -> int:
    lines = read_proc(pid, "status").decode().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def _loads(server: Server) -> int:
    return (LOGS / f"{server.name}.log").read_text().count("loading model")


def _wait_ready(server: Server, path: str) -> None:
    deadline = time.monotonic() + WAIT_SECS
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", server.ports.http, timeout=10)
        connection.request("GET", path)
        status = connection.getresponse().status
        connection.close()
        if status == http.client.OK:
            return
        if time.monotonic() > deadline:
            raise LoadTestFailed(f"{path} is {status} after {WAIT_SECS:g} s")
        time.sleep(POLL_SECS)
