"""Documents of Kubernetes: the check of their fields, and what stands in them."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tests.deploy import wheels

SCHEMAS = Path(__file__).parent / "schemas"
WORKLOADS = ("Deployment", "StatefulSet")
WRITABLE = {"/tmp", "/var/cache/sluice", "/var/lib/sluice"}
"""Folders that a server writes: the others of a container are read-only."""

Document = dict[str, Any]
Labels = Mapping[str, str]


def check(document: Document) -> None:
    """Raise ValidationError for a wrong document; a kind without a schema fails, too."""
    validator(document["apiVersion"], document["kind"]).validate(document)


@cache
def validator(version: str, kind: str) -> jsonschema.Draft202012Validator:
    """The validator of a kind: its schema is in `schemas`, or Kubernetes has it."""
    own = SCHEMAS / f"{kind}.json"
    if own.exists():
        schema = json.loads(own.read_text())
    else:
        group, _, number = version.rpartition("/")
        of_group = f"{group.split('.')[0]}-{number}" if group else number
        schema = wheels.schema(f"{kind.lower()}-{of_group}.json")
    assert schema is not None, f"no schema of {version} {kind}"
    return jsonschema.Draft202012Validator(schema, registry=Registry(retrieve=_definitions))


@cache
def _definitions(uri: str) -> Resource[Any]:
    return Resource.from_contents(wheels.schema(uri.rpartition("/")[2]), DRAFT202012)


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    """The documents of these kinds."""
    return [each for each in documents if each["kind"] in kinds]


def name(document: Document) -> str:
    """The name of a document."""
    found: str = document["metadata"]["name"]
    return found


def templates(documents: list[Document]) -> Iterator[Document]:
    """The templates of pods, also those of a RayCluster."""
    for each in of_kind(documents, *WORKLOADS):
        yield each["spec"]["template"]
    for each in of_kind(documents, "RayCluster"):
        groups = [each["spec"]["headGroupSpec"], *each["spec"]["workerGroupSpecs"]]
        yield from (group["template"] for group in groups)


def containers(documents: list[Document]) -> Iterator[Document]:
    """The containers of all templates."""
    for each in templates(documents):
        yield from each["spec"]["containers"]


def selected(documents: list[Document], labels: Labels) -> list[Document]:
    """The templates whose pods have these labels."""
    return [
        each
        for each in templates(documents)
        if labels.items() <= each["metadata"]["labels"].items()
    ]


def targets(template: Document, port: int | str) -> set[int]:
    """The ports of a template that a port of a Service or a policy stands for.

    KubeRay adds the port `metrics` to its own container, which is the first one.
    """
    own, *others = template["spec"]["containers"]
    found = [(each["name"], each["containerPort"]) for one in others for each in one["ports"]]
    found += [(each["name"], each["containerPort"]) for each in own["ports"]]
    if own["name"].startswith("ray-"):
        found.append(("metrics", 8080))
    return {number for name, number in found if port in (name, number)}


def ports(template: Document) -> dict[str, int]:
    """The named ports of a template's containers."""
    found = [port for each in template["spec"]["containers"] for port in each["ports"]]
    return {each["name"]: each["containerPort"] for each in found}
