"""The Containerfile copies files of the repository, and starts `sluice serve` with its options."""

import json
import re
from pathlib import Path

import pytest

import install
from tests.deploy.manifests import WRITABLE
from tests.deploy.serve_options import unknown
from tests.serving import ROOT

TEXT = (ROOT / "deploy" / "Containerfile").read_text().replace("\\\n", " ")
STAGES = re.findall(r"^FROM (\S+) AS (\S+)$", TEXT, re.MULTILINE)
COPIES = [line.split()[1:-1] for line in TEXT.splitlines() if line.startswith("COPY ")]
TARGETS = ("cpu", "vllm-cpu", "cuda")


def names(pattern: str) -> list[str]:
    found = re.search(pattern, TEXT)
    assert found, pattern
    return found[1].replace("'", "").split()


def test_each_copied_path_is_in_the_repository() -> None:
    sources = [each for copy in COPIES if not copy[0].startswith("--") for each in copy]
    assert {"gateway", "backends", "deploy/tritonserver"} < set(sources)
    assert [each for each in sources if not (ROOT / each).exists()] == []


def test_each_stage_begins_from_the_base_or_an_earlier_stage() -> None:
    earlier = {"${BASE}"}
    for base, stage in STAGES:
        assert base in earlier, stage
        earlier.add(stage)
    copied = {copy[0].removeprefix("--from=") for copy in COPIES if copy[0].startswith("--from")}
    assert copied < earlier
    assert earlier > set(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_is_a_server_with_the_environment_of_its_own_stage(target: str) -> None:
    assert ("server", target) in STAGES
    stage = TEXT.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
    assert f"COPY --from=build-{target} /opt/sluice /opt/sluice" in stage


def test_the_command_is_one_that_serve_knows() -> None:
    command = json.loads(re.findall(r"^CMD (.*)$", TEXT, re.MULTILINE)[0])
    assert command[0] == "serve"
    assert unknown(command[1:]) == []


def test_folders_that_the_server_writes_are_its_own() -> None:
    assert {*names(r"chown 1000:1000 (.*)"), "/tmp"} == WRITABLE


def test_the_base_has_a_tag() -> None:
    assert re.fullmatch(r"\S+:[\w.-]+", names(r"ARG BASE=(\S+)")[0])


def test_the_packages_of_the_cpu_target_are_in_the_lock() -> None:
    pinned = {
        pin.split("==")[0] for pin in install.pins_in((ROOT / "requirements-cpu.lock").read_text())
    }
    packages = names(r"/wheels/\*\.whl (onnxruntime .*)")
    assert {re.sub(r"\[.*", "", each) for each in packages} <= pinned
    assert {"uv", "setuptools"} <= pinned, "they build the wheel and install it"


def test_overrides_remove_only_packages_that_the_lock_lacks() -> None:
    lock = (ROOT / "requirements-cpu.lock").read_text()
    lines = (ROOT / "deploy" / "overrides.txt").read_text().splitlines()
    removed = [line.split(";")[0] for line in lines if not line.startswith("#")]
    assert removed
    assert [name for name in removed if f"\n{name}==" in lock] == []


def test_tritonserver_is_a_script_of_the_image_and_no_command_of_the_package() -> None:
    script = ROOT / "deploy" / "tritonserver"
    assert script.read_text() == '#!/bin/sh\nexec sluice tritonserver "$@"\n'
    assert script.stat().st_mode & 0o111 == 0o111
    assert "tritonserver" not in Path(ROOT / "pyproject.toml").read_text()
