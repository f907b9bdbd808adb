"""Parameters of a model, as Triton's OpenVINO backend reads them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.process_limits import processors
from gateway.tensor_runtime.model_files import file_below
from gateway.tensor_runtime.parameters import count, instances_on_cpu

CPU = "CPU"
DEVICE = "TARGET_DEVICE"
STREAMS = "NUM_STREAMS"
HINT = "PERFORMANCE_HINT"
THREADS = "INFERENCE_NUM_THREADS"
COMPILE_THREADS = "COMPILATION_NUM_THREADS"
BF16 = "HINT_BF16"
PRECISION = "INFERENCE_PRECISION_HINT"
RESHAPE = "RESHAPE_IO_LAYERS"
EXTENSION = "CPU_EXTENSION_PATH"

HINTS = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")
SPECIAL_STREAMS = ("AUTO", "NUMA")

Properties = Mapping[str, str | int | bool]


@dataclass(frozen=True, slots=True)
class OpenVinoParameters:
    """The device of a model, the properties of its compilation, and changes of its file.

    `reshapes`: its inputs get the dims of the config. `extension` is a library of operations.
    """

    device: str
    properties: Properties
    reshapes: bool
    extension: Path | None

    @classmethod
    def read(cls, config: ModelConfig, folder: Path) -> "OpenVinoParameters":
        """The parameters of a config; InferenceError INVALID_ARG for an invalid value."""
        found = {key.upper(): value.strip() for key, value in config.parameters.items()}
        device = found.get(DEVICE, CPU).upper()
        properties = {**_defaults(device, config), **dict(_given(found))}
        return cls(
            device,
            properties,
            found.get(RESHAPE, "").upper() == "YES",
            _extension(found, config, folder),
        )

    def of_one_instance(self, config: ModelConfig) -> Properties:
        """The properties of a model that is compiled for each instance: its part of the threads."""
        if self.device != CPU:
            return self.properties
        threads = (int(self.properties[THREADS]) or processors()) // instances_on_cpu(config)
        return {**self.properties, STREAMS: "1", THREADS: max(1, threads)}


def _defaults(device: str, config: ModelConfig) -> Properties:
    """Instances compute side by side, on the cores of this process, in float32.

    The cores are those of the affinity: neither this number nor the library's regards a container's
    quota. The library computes in bfloat16 where the CPU can, with other answers than elsewhere,
    also if AUTO or the like chooses the CPU; and it binds its threads to cores, where other work
    may be.
    """
    if device != CPU:
        return {PRECISION: "f32"} if _may_be_cpu(device) else {}
    return {
        STREAMS: str(instances_on_cpu(config)),
        THREADS: processors(),
        PRECISION: "f32",
        "ENABLE_CPU_PINNING": False,
    }


def _may_be_cpu(device: str) -> bool:
    """Whether the CPU is among the devices of AUTO, MULTI, HETERO or BATCH.

    AUTO chooses among all devices if it lists none, or only some that it may not choose: `-GPU`.
    """
    kind, _, listed = device.partition(":")
    names = [each.partition("(")[0] for each in listed.split(",") if each]
    if kind == "AUTO" and all(each.startswith("-") for each in names):
        return f"-{CPU}" not in names
    return CPU in names


def _given(found: Mapping[str, str]) -> Iterator[tuple[str, str | int]]:
    if STREAMS in found:
        yield STREAMS, _streams(found)
    if HINT in found:
        yield HINT, _one_of(found, HINT, HINTS, "/".join(HINTS))
    for key in (THREADS, COMPILE_THREADS):
        if key in found:
            yield key, _number(found, key)
    if BF16 in found:
        _one_of(found, BF16, ("YES",), "YES")
        yield PRECISION, "bf16"


def _streams(found: Mapping[str, str]) -> str:
    if found[STREAMS].upper() in SPECIAL_STREAMS:
        return found[STREAMS].upper()
    return str(_number(found, STREAMS, "either AUTO/NUMA/<int_value>"))


def _one_of(found: Mapping[str, str], key: str, allowed: tuple[str, ...], shown: str) -> str:
    if found[key].upper() not in allowed:
        raise _unexpected(key, shown, found[key])
    return found[key].upper()


def _number(found: Mapping[str, str], key: str, expected: str = "a non-negative number") -> int:
    if not found[key].isdecimal():
        raise _unexpected(key, expected, found[key])
    return count(found, key)


def _unexpected(key: str, expected: str, text: str) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG,
        f"expected the parameter '{key}' to be {expected}, got {text.lower()}",
    )


def _extension(found: Mapping[str, str], config: ModelConfig, folder: Path) -> Path | None:
    """The library of operations; a client may send a config, and must not name one of the host."""
    if not (name := found.get(EXTENSION, "")):
        return None
    return file_below(folder.parent, folder, name, config)
