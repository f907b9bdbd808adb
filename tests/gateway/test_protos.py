"""Our protocol definitions are the same as Triton's on the wire.

The client's descriptors and ours share one pool when they share a process, and comparing an object
with itself proves nothing. So ours are read in a process of their own, as serialized bytes.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    MethodDescriptorProto,
)
from tritonclient.grpc import model_config_pb2, service_pb2

ROOT = Path(__file__).resolve().parents[2]
STUBS = ROOT / "gateway" / "protos" / "grpc_service_pb2_grpc.py"
FILES = ("grpc_service.proto", "model_config.proto")

THEIR_BYTES = {
    module.DESCRIPTOR.name: module.DESCRIPTOR.serialized_pb
    for module in (service_pb2, model_config_pb2)
}
THEIRS = [FileDescriptorProto.FromString(data) for data in THEIR_BYTES.values()]

PRINT_OURS = """
from gateway.protos import grpc_service_pb2, grpc_service_pb2_grpc, model_config_pb2
for module in (grpc_service_pb2, model_config_pb2):
    print(module.DESCRIPTOR.name, module.DESCRIPTOR.serialized_pb.hex())
"""
IMPORT_OURS = "import gateway.protos.grpc_service_pb2_grpc"
IMPORT_THEIRS = "import tritonclient.grpc"


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=50
    )


@cache
def our_bytes() -> Mapping[str, bytes]:
    printed = run_python("-c", PRINT_OURS)
    assert printed.returncode == 0, printed.stderr
    lines = (line.split() for line in printed.stdout.splitlines())
    return {name: bytes.fromhex(digits) for name, digits in lines}


def ours() -> list[FileDescriptorProto]:
    return [FileDescriptorProto.FromString(data) for data in our_bytes().values()]


def messages(files: Iterable[FileDescriptorProto]) -> dict[str, DescriptorProto]:
    """Every message by its dotted name: nested ones too, and the entries of maps."""
    return {
        name: message
        for file in files
        for top in file.message_type
        for name, message in with_nested(top, f"{file.package}.{top.name}")
    }


def with_nested(message: DescriptorProto, name: str) -> Iterator[tuple[str, DescriptorProto]]:
    yield name, message
    for nested in message.nested_type:
        yield from with_nested(nested, f"{name}.{nested.name}")


def enums(files: list[FileDescriptorProto]) -> dict[str, EnumDescriptorProto]:
    """Every enum by its dotted name, at the top of a file or inside a message."""
    top = {f"{file.package}.{enum.name}": enum for file in files for enum in file.enum_type}
    nested = {
        f"{name}.{enum.name}": enum
        for name, message in messages(files).items()
        for enum in message.enum_type
    }
    return top | nested


def rpcs(files: Iterable[FileDescriptorProto]) -> dict[str, MethodDescriptorProto]:
    """Every RPC by the path that a client calls."""
    return {
        f"/{file.package}.{service.name}/{rpc.name}": rpc
        for file in files
        for service in file.service
        for rpc in service.method
    }


def field_facts(message: DescriptorProto) -> dict[str, dict[str, object]]:
    """All there is to know of each field, oneofs by name instead of by position."""
    return {
        field.name: {
            "number": field.number,
            "type": FieldDescriptorProto.Type.Name(field.type),
            "type_name": field.type_name,
            "label": FieldDescriptorProto.Label.Name(field.label),
            "oneof": message.oneof_decl[field.oneof_index].name
            if field.HasField("oneof_index")
            else None,
            "presence": field.proto3_optional,
            "default": field.default_value,
            "options": str(field.options),
        }
        for field in message.field
    }


def test_no_message_is_missing_or_added() -> None:
    assert messages(ours()).keys() == messages(THEIRS).keys()


def test_no_enum_is_missing_or_added() -> None:
    assert enums(ours()).keys() == enums(THEIRS).keys()


def test_no_rpc_is_missing_or_added() -> None:
    assert list(rpcs(ours())) == list(rpcs(THEIRS))


@pytest.mark.parametrize("name", messages(THEIRS))
def test_every_message_has_tritons_fields(name: str) -> None:
    assert field_facts(messages(ours())[name]) == field_facts(messages(THEIRS)[name])


@pytest.mark.parametrize("name", messages(THEIRS))
def test_every_message_has_tritons_oneofs_and_options(name: str) -> None:
    mine, theirs = messages(ours())[name], messages(THEIRS)[name]
    assert [oneof.name for oneof in mine.oneof_decl] == [oneof.name for oneof in theirs.oneof_decl]
    assert mine.options == theirs.options


@pytest.mark.parametrize("name", enums(THEIRS))
def test_every_enum_has_tritons_values(name: str) -> None:
    mine, theirs = enums(ours())[name], enums(THEIRS)[name]
    assert {value.name: value.number for value in mine.value} == {
        value.name: value.number for value in theirs.value
    }


@pytest.mark.parametrize("path", rpcs(THEIRS))
def test_every_rpc_has_tritons_types_and_streams(path: str) -> None:
    assert rpcs(ours())[path] == rpcs(THEIRS)[path]


@pytest.mark.parametrize("file", FILES)
def test_every_file_is_tritons_to_the_byte(file: str) -> None:
    assert our_bytes()[file] == THEIR_BYTES[file], "order of declarations counts as well"


@pytest.mark.parametrize(
    ("first", "second"), [(IMPORT_OURS, IMPORT_THEIRS), (IMPORT_THEIRS, IMPORT_OURS)]
)
def test_client_and_server_live_in_one_process(first: str, second: str) -> None:
    imported = run_python("-c", f"{first}\n{second}")
    # Protobuf's own message is the last line; before it comes the whole serialized file.
    assert imported.returncode == 0, imported.stderr.splitlines()[-1]


@pytest.mark.skipif(
    importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed"
)
def test_generated_modules_are_up_to_date() -> None:
    version = importlib.metadata.version("grpcio-tools")
    if f"GRPC_GENERATED_VERSION = '{version}'" not in STUBS.read_text():
        pytest.skip(f"grpcio-tools {version} did not write these modules")
    checked = run_python("proto/generate.py", "--check")
    assert checked.returncode == 0, checked.stderr
