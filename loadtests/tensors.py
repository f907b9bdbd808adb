"""Tensors by the gateway and by Triton: small ones, Python models, transports of gRPC, API keys.

The client is NVIDIA's perf_analyzer; streams have clients of their own.
"""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from gateway.policy.key_file import text_of_key
from gateway.policy.keys import ApiKey, Role, new_key
from loadtests import streams
from loadtests.support import rounds, triton
from loadtests.support.results import Line, Metric
from loadtests.support.rounds import Report, Step
from loadtests.support.servers import Server, gateway
from loadtests.support.triton import ENSEMBLE, Traffic, of_gateway, of_triton, write_texts

HERE = Path(__file__).parent
WIRES = {"http": "HTTP", "grpc": "gRPC"}
SMALL, LARGE = "add_sub", "negate"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every test with perf_analyzer and several numbers of clients."""
    parser.add_argument("--clients", type=rounds.positive_list, default=[1, 8, 32], metavar="N,N")
    triton.add_flags(parser)
    rounds.add_flags(parser)


def tensors(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure inferences per second of `add_sub`, the sum and difference of 16 floats.

    The model runs in ONNX Runtime in the gateway, and in a Python model in Triton.
    """
    add_flags(parser)
    rounds.run_test(parser, arguments, _tensors)


def _tensors(asked: argparse.Namespace, _: Path, console: Console) -> Report:
    contenders = [gateway(HERE / "models")]
    if asked.triton:
        contenders.insert(0, triton.triton(asked.triton, HERE / "triton_models"))
    steps = [_requests(asked, SMALL, wire, each) for wire in WIRES for each in asked.clients]
    title = "add_sub, 16 floats"
    return rounds.compare_contenders(title, contenders, steps, asked, console)[1]


def _requests(
    asked: argparse.Namespace, model: str, wire: str, clients: int, *extra: str, key: str = ""
) -> Step:
    traffic = Traffic(model=model, wire=wire, clients=clients, extra=extra, key=key)
    return f"{model} over {wire}, {clients} clients", partial(_rate, asked, traffic)


def _rate(asked: argparse.Namespace, traffic: Traffic, server: Server) -> Mapping[Metric, float]:
    line = Line(f"{traffic.model} {WIRES[traffic.wire]}", "infer", traffic.clients)
    return triton.measure_costs(asked, traffic, line, server)


def parts_of(known: Sequence[str], text: str) -> Sequence[str]:
    """The parts in a list of names with commas; ArgumentTypeError for an unknown one."""
    asked = text.split(",")
    if unknown := set(asked) - set(known):
        raise argparse.ArgumentTypeError(f"{sorted(unknown)}: expected some of {','.join(known)}")
    return asked


def add_parts_flag(parser: argparse.ArgumentParser, parts: Sequence[str]) -> None:
    """The flag `--parts`, by default all parts."""
    parser.add_argument(
        "--parts",
        type=partial(parts_of, parts),
        default=parts,
        metavar="NAME,NAME",
        help=f"parts of the test (default: {','.join(parts)})",
    )


DECOUPLED = {"sse": "SSE", "frames": "ModelStreamInfer"}
PYTHON_PARTS = ("small", "large", "decoupled", "business", "ensemble")
FEW = (1, 8)
"""Clients for tests in which more of them show no difference."""
RESPONSES = 1000
"""Of a request to the decoupled model."""


def python(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure the same model.py in the gateway and in Triton.

    Small tensors, tensors of 1 MiB, a decoupled model with many responses, business logic that
    calls two models, and an ensemble of tokenizer, encoder and pooling.
    """
    add_parts_flag(parser, PYTHON_PARTS)
    triton.add_encoder_flags(parser)
    add_flags(parser)
    rounds.run_test(parser, arguments, _python)


def _python(asked: argparse.Namespace, folder: Path, console: Console) -> Report:
    write_texts(folder / "texts.json", asked.sentences)
    contenders = [gateway(of_gateway(folder / "gateway"))]
    if asked.triton:
        theirs = of_triton(folder / "triton", asked.onnx, asked.threads)
        contenders.insert(0, triton.triton(asked.triton, theirs))
    steps = [
        step
        for part in PYTHON_PARTS
        if part in asked.parts
        for step in _python_steps(part, asked, folder / "texts.json")
    ]
    return rounds.compare_contenders("Python models", contenders, steps, asked, console)[1]


def _python_steps(part: str, asked: argparse.Namespace, texts: Path) -> Sequence[Step]:
    return {
        "small": [_requests(asked, SMALL, wire, each) for wire in WIRES for each in asked.clients],
        "large": [_requests(asked, LARGE, wire, each) for wire in WIRES for each in FEW],
        "decoupled": [
            _responses(f"repeat {name}", kind, count, asked.window_secs, RESPONSES)
            for kind, name in DECOUPLED.items()
            for count in FEW
        ],
        "business": [_requests(asked, "business", wire, 1) for wire in WIRES],
        "ensemble": [
            _requests(asked, ENSEMBLE, "http", clients, "--input-data", str(texts))
            for clients in asked.clients
        ],
    }[part]


def _responses(name: str, kind: str, count: int, *limits: float) -> Step:
    def measure(server: Server) -> Mapping[Metric, float]:
        return streams.rate(server, name, kind, count, *limits)

    return f"{name}, {count} streams", measure


TRANSPORTS = ("grpcio", "hyper")
STREAM_COUNTS = (1, 4, 64)
GRPC_PARTS = ("small", "half-load", "large", "streams")


def transports(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure gRPC by both transports of the gateway, and by Triton.

    `add_sub` has 16 floats, `negate` 1 MiB each way, `repeat` many responses per request. At half
    load requests are sent at a steady rate, and their latency is measured.
    """
    add_parts_flag(parser, GRPC_PARTS)
    parser.add_argument(
        "--half-load",
        type=int,
        default=2500,
        metavar="N",
        help="requests per second of the part half-load (default: %(default)s)",
    )
    add_flags(parser)
    rounds.run_test(parser, arguments, _transports)


def _transports(asked: argparse.Namespace, folder: Path, console: Console) -> Report:
    ours = _with_negate(folder / "gateway", HERE / "models")
    contenders = [
        gateway(ours, f"gateway, {each}", f"--grpc-transport={each}") for each in TRANSPORTS
    ]
    if asked.triton:
        theirs = _with_negate(folder / "triton", HERE / "triton_models")
        contenders.insert(0, triton.triton(asked.triton, theirs))
    steps = [
        step for part in GRPC_PARTS if part in asked.parts for step in _transport_steps(part, asked)
    ]
    return rounds.compare_contenders("gRPC", contenders, steps, asked, console)[1]


def _with_negate(folder: Path, models: Path) -> Path:
    shutil.copytree(models, folder)
    shutil.copytree(HERE / "python_models" / LARGE, folder / LARGE)
    return folder


def _transport_steps(part: str, asked: argparse.Namespace) -> Sequence[Step]:
    found: Mapping[str, Sequence[Step]] = {
        "small": [_requests(asked, SMALL, "grpc", clients) for clients in asked.clients],
        "half-load": [(f"{SMALL}, half load", partial(_half_load, asked))],
        "large": [_requests(asked, LARGE, "grpc", clients) for clients in asked.clients[:2]],
        "streams": [
            _responses("ModelStreamInfer", "frames", count, streams.SECS) for count in STREAM_COUNTS
        ],
    }
    return found[part]


def _half_load(asked: argparse.Namespace, server: Server) -> Mapping[Metric, float]:
    rate = ("--request-rate-range", str(asked.half_load))
    traffic = Traffic(model=SMALL, wire="grpc", clients=0, extra=rate)
    line = Line(f"{SMALL} gRPC at {asked.half_load}/s", "infer")
    return triton.measure_costs(asked, traffic, line, server)


def policy(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure `add_sub` on a gateway without API keys and on one with many; clients send one."""
    parser.add_argument(
        "--keys",
        type=rounds.positive,
        default=100_000,
        metavar="N",
        help="keys in the file (default: %(default)s)",
    )
    add_flags(parser)
    rounds.run_test(parser, arguments, _policy)


def _policy(asked: argparse.Namespace, folder: Path, console: Console) -> Report:
    file = folder / "keys.toml"
    sent = write_keys(file, asked.keys)
    models = HERE / "models"
    contenders = [
        gateway(models, "gateway, no keys"),
        gateway(models, "gateway, keys", f"--api-keys={file}"),
    ]
    steps = [
        _requests(asked, SMALL, wire, each, key=sent) for wire in WIRES for each in asked.clients
    ]
    title = f"add_sub, 16 floats; {asked.keys} API keys"
    return rounds.compare_contenders(title, contenders, steps, asked, console)[1]


def write_keys(file: Path, count: int) -> str:
    """Write a key file with a number of keys, the first of which is returned."""
    made = [new_key() for _ in range(count)]
    roles = frozenset(Role)
    parts = [text_of_key(ApiKey(key_id, digest, "team", roles)) for _, key_id, digest in made]
    file.touch(0o600)
    file.write_text("\n".join(parts))
    return made[0][0]
