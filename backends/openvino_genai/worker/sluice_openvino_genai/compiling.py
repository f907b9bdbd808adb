"""The process that compiles structures first, since a wrong one can stop or end a process.

The library compiles a structure in the step that first uses it, and an exception of a step leaves
an engine in an unknown state. The tiny engine of this process has a few hundred tokens and one
layer. It is made of a GGUF file that is written here.
"""

import json
import math
import os
import resource
import signal
import struct
import sys
import time
from typing import Any

from .engine import GenAiLibrary, import_library, reason, temporary_file
from .model_file import PROPERTIES
from .sampling import Structure, structured

CPU = resource.RLIMIT_CPU
MOST_SECS = 0.25
"""Longest compilation for the tiny engine; for a real vocabulary it takes many times as long."""
LAST_SECS = 2
"""Processor time of a compilation after which the system ends the process."""
WIDTH = 64
IMPOSSIBLE = 0
"""The token of a byte that no text has: the library makes token 0 if a structure allows none."""
END = 256
UINT32, INT32, FLOAT32, STRING, ARRAY = 4, 5, 6, 8, 9
F32, F16 = 0, 1
ALIGNMENT = 32


def main() -> None:
    """Answer each line of the standard input, a kind and a text in JSON.

    An answer is a JSON text: what is wrong with the structure, "" if nothing is. The first line
    is about a good one: the engine is ready.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker's end is the end of the input
    answers = os.fdopen(os.dup(1), "w", 1)
    os.dup2(2, 1)  # the library prints
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    compiler = TinyEngine(import_library())
    answers.write(json.dumps(compiler.wrong(Structure("regex", "a"))) + "\n")
    for line in sys.stdin:
        _limit_processor_time()
        answers.write(json.dumps(compiler.wrong(Structure(*json.loads(line)))) + "\n")


def _limit_processor_time() -> None:
    most, hard = math.ceil(time.process_time()) + LAST_SECS, resource.getrlimit(CPU)[1]
    soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(CPU, (soft, hard))


class TinyEngine:
    """An engine for one structure after another; a step that raises may cost a new one."""

    def __init__(self, library: GenAiLibrary) -> None:
        self._library = library
        self._engine: Any = None

    def wrong(self, structure: Structure) -> str:
        """The end of a sentence about a structure that cannot be used, else ""."""
        engine, self._engine = self._engine or self._opened(), None
        began = time.process_time()
        try:
            first = self._first_token(engine, structure)
        except Exception as error:  # noqa: BLE001 - of foreign code, about one structure
            return f"is refused: {reason(error)}"
        if (secs := time.process_time() - began) > MOST_SECS:
            return (
                f"takes too long to compile ({secs:.1f} s for a tiny vocabulary, expected at most "
                f"{MOST_SECS:g} s): repeat less in it"
            )
        if first == IMPOSSIBLE:
            return (
                "is fitted by no text: a part of it refers to itself without end, or has no value"
            )
        return ""

    def _first_token(self, engine: Any, structure: Structure) -> int:
        config = self._library.genai.GenerationConfig()
        config.apply_chat_template = False
        config.set_eos_token_id(END)
        config.max_new_tokens = 1
        handle = None
        try:
            config.structured_output_config = structured(self._library.genai, structure)
            handle = engine.add_request(0, self._library.prompt([ord("a")]), config)
            while engine.has_non_finished_requests():
                engine.step()
        except Exception:
            if handle is None or _emptied(engine, handle):
                self._engine = engine
            raise
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
