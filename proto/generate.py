"""How do the modules in gateway/protos come about? Run this after a change to a .proto file."""

import argparse
import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

SOURCES = Path(__file__).resolve().parent
STANDARD = files("grpc_tools") / "_proto"
"""The definitions of protobuf itself."""
TARGET = SOURCES.parent / "gateway" / "protos"
WITH_SERVICE = ("grpc_service.proto", "rollout.proto")
WITHOUT_SERVICE = "model_config.proto"

# protoc imports siblings from the top level, where only its output folder would be on the path.
SIBLING_IMPORT = re.compile(r"^import (\w+_pb2) as (\w+)$", re.MULTILINE)


def main() -> None:
    """Write the generated modules, or with `--check` only say whether they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a module is out of date"
    )
    arguments = parser.parse_args()
    modules = generate()
    if not arguments.check:
        write(modules)
    elif stale := outdated(modules):
        sys.exit(f"out of date: {', '.join(stale)}; run `python proto/generate.py`")


def generate() -> dict[str, str]:
    """Compile the .proto files and return the text of each module by its file name."""
    with tempfile.TemporaryDirectory() as folder:
        compile_to(folder)
        return {
            path.name: SIBLING_IMPORT.sub(r"from gateway.protos import \1 as \2", path.read_text())
            for path in sorted(Path(folder).iterdir())
        }


def compile_to(folder: str) -> None:
    """Run protoc; file names are relative, because they become names in the descriptor pool."""
    paths = [f"--proto_path={SOURCES}", f"--proto_path={STANDARD}"]
    options = [*paths, f"--python_out={folder}", f"--pyi_out={folder}"]
    services = [*paths, f"--grpc_python_out={folder}"]
    for command in (
        ["protoc", *options, *WITH_SERVICE, WITHOUT_SERVICE],
        ["protoc", *services, *WITH_SERVICE],
    ):
        if status := protoc.main(command):
            sys.exit(f"protoc failed with status {status}")


def write(modules: dict[str, str]) -> None:
    for name, text in modules.items():
        (TARGET / name).write_text(text)


def outdated(modules: dict[str, str]) -> list[str]:
    """Name the modules whose file is missing or has another text."""
    return [
        name
        for name, text in modules.items()
        if not (TARGET / name).is_file() or (TARGET / name).read_text() != text
    ]


if __name__ == "__main__":
    main()
