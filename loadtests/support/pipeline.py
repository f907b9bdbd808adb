"""A load on OpenVINO GenAI alone, in a process of its own."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtests.support.generation import PROMPT_WORDS, Load, prompts

PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": False}
"""The gateway's own properties of the engine."""
TIMEOUT_SECS = 600.0


def tokens_per_sec(weights: Path, settings: Mapping[str, Any], load: Load) -> float:
    """The tokens per second of a load; `settings` are fields of the library's scheduler."""
    given = (str(weights), json.dumps(settings), json.dumps(asdict(load)))
    command = [sys.executable, "-m", __name__, *given]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_SECS)
    return float(done.stdout.splitlines()[-1])


class Alone:
    """The library's pipeline, with streams that take new texts as they are made."""

    def __init__(self, weights: str, settings: Mapping[str, Any], max_tokens: int) -> None:
        # Imported here: the process that reads the figures does not need the library.
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        for name, value in settings.items():
            setattr(scheduler, name, value)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            weights, scheduler, "CPU", PROPERTIES
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._running = openvino_genai.GenerationStatus.RUNNING
        self._sampling = openvino_genai.GenerationConfig()
        self._sampling.max_new_tokens = max_tokens
        self._sampling.ignore_eos = True
        self._sampling.set_eos_token_id(self._tokenizer.get_eos_token_id())
        self._words = prompts(PROMPT_WORDS, 1)
        self._requests = 0

    def run(self, streams: int, requests: int) -> None:
        """Make the texts of that many streams, each with its requests, one after the other."""
        left, handles = streams * requests, []
        while left or handles:
            while left and len(handles) < streams:
                handles.append(self._request())
                left -= 1
            self._pipeline.step()
            for handle in handles:
                if handle.can_read():
                    handle.read()
            handles = [each for each in handles if each.get_status() == self._running]

    def _request(self) -> Any:
        self._requests += 1
        ids = self._tokenizer.encode(next(self._words)).input_ids
        return self._pipeline.add_request(self._requests, ids, self._sampling)


def main() -> None:
    """Print the tokens per second of a load, after one that is not measured."""
    weights, settings, given = sys.argv[1:]
    load = Load(**json.loads(given))
    alone = Alone(weights, json.loads(settings), load.max_tokens)
    alone.run(load.streams, 1)
    began = time.perf_counter()
    alone.run(load.streams, load.requests)
    print(load.tokens / (time.perf_counter() - began))


if __name__ == "__main__":
    main()
