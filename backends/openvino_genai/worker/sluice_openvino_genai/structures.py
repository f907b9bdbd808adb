"""Checks of structures by a tiny engine, since a wrong one breaks the engine that gets it.

The library compiles a structure in the step that first uses it, and an exception of a step leaves
an engine in an unknown state. The tiny engine compiles it first, in milliseconds: it has a few
hundred tokens and one layer. It is made of a GGUF file that is written here.
"""

import struct
import time
from typing import Any

from sluice_llm.request import Refusal

from .engine import GenAiLibrary, reason, temporary_file
from .model_file import PROPERTIES
from .pattern_size import patterns, states
from .sampling import Structure, structured

MOST_SECS = 0.25
"""Longest compilation for the tiny engine; for a real vocabulary it takes many times as long."""
MOST_LETTERS = 64 << 10
MOST_STATES = 20_000
"""States of all regular expressions; nested repetitions otherwise take the library minutes."""
MOST_DEPTH = 64
"""Nested brackets; the library compiles by recursion."""
WIDTH = 64
IMPOSSIBLE = 0
"""The token of a byte that no text has: the library makes token 0 if a structure allows none."""
END = 256
UINT32, INT32, FLOAT32, STRING, ARRAY = 4, 5, 6, 8, 9
F32, F16 = 0, 1
ALIGNMENT = 32


class StructureCheck:
    """Refuses wrong structures; the tiny engine is started by the first check."""

    def __init__(self, library: GenAiLibrary) -> None:
        self._library = library
        self._engine: Any = None
        self._known: dict[Structure, None] = {}

    def check(self, structure: Structure) -> None:
        """Refusal if the library cannot compile it, or takes too long."""
        if structure in self._known:
            return
        _check_size(structure)
        engine, self._engine = self._engine or self._opened(), None
        began = time.process_time()
        first = self._first_token(engine, structure)
        if (secs := time.process_time() - began) > MOST_SECS:
            raise Refusal(
                f"{_name(structure)} takes too long to compile ({secs:.1f} s for a tiny "
                f"vocabulary, expected at most {MOST_SECS:g} s): repeat less in it"
            )
        if first == IMPOSSIBLE:
            raise Refusal(
                f"{_name(structure)} is fitted by no text: a part of it refers to itself without "
                "end, or has no value"
            )
        self._known[structure] = None
        if len(self._known) > 256:
            del self._known[next(iter(self._known))]

    def _first_token(self, engine: Any, structure: Structure) -> int:
        """The first token of an answer; Refusal if the library cannot compile the structure."""
        config = self._library.genai.GenerationConfig()
        config.apply_chat_template = False
        config.set_eos_token_id(END)
        config.max_new_tokens = 1
        config.structured_output_config = structured(self._library.genai, structure)
        handle = None
        try:
            handle = engine.add_request(0, self._library.prompt([ord("a")]), config)
            while engine.has_non_finished_requests():
                engine.step()
        except RuntimeError as error:
            if handle is not None and _emptied(engine, handle):
                self._engine = engine
            raise Refusal(f"{_name(structure)} is refused: {reason(error)}") from error
        self._engine = engine
        first: int = handle.read_all()[0].generated_ids[0]
        return first

    def _opened(self) -> Any:
        genai = self._library.genai
        folder, path = temporary_file(tiny_gguf(), "tiny.gguf")
        with folder:
            scheduler = genai.SchedulerConfig()
            scheduler.num_kv_blocks = 4
            properties = {**PROPERTIES, "INFERENCE_NUM_THREADS": 1}
            return genai.ContinuousBatchingPipeline(
                str(path), scheduler_config=scheduler, device="CPU", properties=properties
            )


def _emptied(engine: Any, handle: Any) -> bool:
    """Drop the request of a step that has raised; whether the engine can be used again."""
    handle.cancel()
    try:
        engine.step()
    except RuntimeError:
        return False
    return not engine.has_non_finished_requests()


def _check_size(structure: Structure) -> None:
    text, name = structure.text, _name(structure)
    if len(text) > MOST_LETTERS:
        raise Refusal(f"{name} has {len(text)} characters, expected at most {MOST_LETTERS}")
    depth = deepest = 0
    for letter in text:
        depth += (letter in "{[(") - (letter in "}])")
        deepest = max(deepest, depth)
    if deepest > MOST_DEPTH:
        raise Refusal(f"{name} has {deepest} nested brackets, expected at most {MOST_DEPTH}")
    found = [text] if structure.kind == "regex" else patterns(text)
    if structure.kind != "grammar" and (size := sum(map(states, found))) > MOST_STATES:
        raise Refusal(
            f"{name} has patterns with about {size} states, expected at most {MOST_STATES}: repeat "
            "less in them"
        )


def _name(structure: Structure) -> str:
    return f"the structure of the answer ({structure.kind.replace('_', ' ')})"


def tiny_gguf() -> bytes:
    """A model of the llama architecture whose tokens are the 256 bytes, an end and "aa".

    The bytes 0 and 255 have each other's token.
    """
    tokens = [*_byte_tokens(), "<|end|>", "aa"]
    kinds = [*[1] * 256, 3, 1]
    entries = [
        _entry("general.architecture", STRING, _text("llama")),
        *(
            _entry(f"llama.{name}", UINT32, struct.pack("<I", value))
            for name, value in {
                "block_count": 1,
                "context_length": 64,
                "embedding_length": WIDTH,
                "feed_forward_length": WIDTH,
                "vocab_size": len(tokens),
                "attention.head_count": 1,
                "attention.head_count_kv": 1,
                "rope.dimension_count": WIDTH,
            }.items()
        ),
        _entry("general.file_type", UINT32, struct.pack("<I", 1)),
        _entry("llama.rope.freq_base", FLOAT32, struct.pack("<f", 1e4)),
        _entry("llama.attention.layer_norm_rms_epsilon", FLOAT32, struct.pack("<f", 1e-5)),
        _entry("tokenizer.ggml.model", STRING, _text("gpt2")),
        _entry("tokenizer.ggml.pre", STRING, _text("gpt-2")),
        _entry("tokenizer.ggml.tokens", ARRAY, _texts(tokens)),
        _entry(
            "tokenizer.ggml.token_type",
            ARRAY,
            struct.pack(f"<IQ{len(kinds)}i", INT32, len(kinds), *kinds),
        ),
        _entry("tokenizer.ggml.merges", ARRAY, _texts(["a a"])),
        *(
            _entry(f"tokenizer.ggml.{name}_token_id", UINT32, struct.pack("<I", END))
            for name in ("eos", "bos")
        ),
    ]
    shapes = _shapes(len(tokens))
    described, size = [], 0
    for name, shape in shapes.items():
        kind, width = (F16, 2) if len(shape) == 2 else (F32, 4)
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        described.append(_text(name) + sizes + struct.pack("<IQ", kind, size))
        size += _padded(width * shape[0] * (shape[1] if len(shape) == 2 else 1))
    begin = struct.pack("<IQQ", 3, len(shapes), len(entries))
    head = b"".join([b"GGUF", begin, *entries, *described])
    return head + bytes(_padded(len(head)) - len(head) + size)


def _shapes(tokens: int) -> dict[str, tuple[int, ...]]:
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    return {
        "token_embd.weight": (tokens, WIDTH),
        "output_norm.weight": (WIDTH,),
        **{f"blk.0.{name}.weight": (WIDTH, WIDTH) for name in square},
        **{f"blk.0.{name}.weight": (WIDTH,) for name in ("attn_norm", "ffn_norm")},
    }


def _byte_tokens() -> list[str]:
    """The letters by which byte-level tokenizers write the 256 bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    found = [chr(byte if byte in shown else next(hidden)) for byte in range(256)]
    return [found[255], *found[1:255], found[0]]


def _entry(name: str, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _texts(texts: list[str]) -> bytes:
    return struct.pack("<IQ", STRING, len(texts)) + b"".join(map(_text, texts))


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
