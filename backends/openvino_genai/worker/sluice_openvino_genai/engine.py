"""Start of the library's engine, and the errors of the library."""

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from sluice_llm.program import importing
from sluice_llm.request import Mistake, clean

from .model_file import GenAiModelFile
from .tokens import Tokens

HOW_TO_INSTALL = "pip install 'sluice[openvino_genai]'"
_PLACE = re.compile(r"Exception from \S+?:\d+:?|Check '.*?' failed at \S+?:\d+:?")
_GRAMMAR = re.compile(r"^(?:\[[\d:]+\] )?/?\S+\.cc:\d+: ?")
_CHECKED = re.compile(r"Check failed: \(.*?\) is false: ?")


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Log the seconds of the block when it has succeeded."""
    began = time.monotonic()
    yield
    pb_utils.Logger.log_info(f"{name} secs={time.monotonic() - began:.1f}")


@dataclass(frozen=True)
class GenAiLibrary:
    """The modules in use."""

    genai: Any
    Tensor: Any

    def prompt(self, tokens: list[int]) -> Any:
        """Tokens as the library takes them."""
        return self.Tensor(np.array([tokens], np.int64))


def import_library() -> GenAiLibrary:
    """The library; Mistake if it is missing or cannot be imported."""
    # Its import would send an event to its makers. Without this package it sends none.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    with importing("openvino_genai", HOW_TO_INSTALL, reason):
        import openvino
        import openvino_genai
    return GenAiLibrary(openvino_genai, openvino.Tensor)


def opened(library: GenAiLibrary, file: GenAiModelFile, threads: int) -> Any:
    """A running engine; blocks during its start."""
    scheduler = library.genai.SchedulerConfig()
    for name, value in file.scheduler.items():
        setattr(scheduler, name, value)
    properties = {"INFERENCE_NUM_THREADS": threads, **file.properties}
    try:
        with stage("engine started"):
            return library.genai.ContinuousBatchingPipeline(
                str(file.weights), scheduler_config=scheduler, device="CPU", properties=properties
            )
    except Exception as error:  # one load, by foreign code
        raise Mistake(f"its {file.weights.name} cannot be loaded: {reason(error)}") from error


def tokens_of(pipeline: Any) -> Tokens:
    """The tokenizer, with all ends of texts that the model's `generation_config.json` has."""
    with stage("tokenizer opened"):
        tokenizer, config = pipeline.get_tokenizer(), pipeline.get_config()
        end = config.eos_token_id
        if end < 0:
            end = tokenizer.get_eos_token_id()
        return Tokens(tokenizer, end, config.stop_token_ids)


def cache_blocks(library: GenAiLibrary, pipeline: Any, end: int) -> int:
    """The blocks of the cache, by the share of them that a first request takes."""
    config = library.genai.GenerationConfig()
    config.apply_chat_template = False
    config.set_eos_token_id(end)
    config.ignore_eos, config.max_new_tokens = True, 2
    handle = pipeline.add_request(0, library.prompt([end]), config)
    with stage("engine warmed up"):
        pipeline.step()
        share = pipeline.get_metrics().cache_usage
        while pipeline.has_non_finished_requests():
            pipeline.step()
    del handle  # without it the library drops the request
    if share <= 0:
        raise Mistake("its engine has no room for a token: raise cache_size or num_kv_blocks")
    blocks: int = round(100 / share)
    return blocks


def reason(error: BaseException) -> str:
    """The library's own words: without places in its source and paths of the host."""
    lines = [_PLACE.sub("", line).strip() for line in str(error).splitlines()]
    text = next((line for line in reversed(lines) if line), type(error).__name__)
    text = _CHECKED.sub("", _GRAMMAR.sub("", text))
    return str(clean(RuntimeError(text)))


def temporary_file(content: bytes, name: str) -> tuple[Any, Path]:
    """A file in a folder that is deleted with the first of the two."""
    folder = tempfile.TemporaryDirectory(prefix="sluice-")
    path = Path(folder.name) / name
    path.write_bytes(content)
    return folder, path


def processors() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
