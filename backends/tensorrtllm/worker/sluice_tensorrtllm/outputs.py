"""Responses of one step as tensors."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from .deltas import Decode, SequenceDelta, contract_logprobs

USAGE = "sluice_usage"
"""The response parameter with prompt tokens, new tokens and the finish reason, for the gateway."""
TIMES = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
BLOCKS = {
    "kv_cache_reused_block": "num_reused_blocks",
    "kv_cache_reused_blocks": "num_reused_blocks",
    "kv_cache_missed_block": "num_missed_blocks",
    "kv_cache_alloc_new_blocks": "num_new_allocated_blocks",
    "kv_cache_alloc_total_blocks": "num_total_allocated_blocks",
}
DRAFTS = ("total_accepted_draft_tokens", "total_draft_tokens")


class TensorResponses:
    """Makes the responses to one request; `batched` models have one more dimension.

    `outputs` are the requested optional ones. `with_logprobs`: the library returns log
    probabilities. `prefix` precedes each text.
    """

    def __init__(
        self, outputs: Collection[str], decode: Decode, *, with_logprobs: bool, batched: bool
    ) -> None:
        self.prefix = ""
        self._outputs = outputs
        self._decode = decode
        self._with_logprobs = with_logprobs
        self._batched = batched
        self._prompt_counted = False

    def responses(
        self, deltas: Sequence[SequenceDelta], prompt_tokens: int, *, final: bool
    ) -> list[Any]:
        """One response with the deltas of every sequence."""
        tensors = [self._texts("text_output", [self.prefix + each.text for each in deltas])]
        tensors += self._optional(deltas, prompt_tokens)
        counted = 0 if self._prompt_counted else prompt_tokens
        self._prompt_counted = True
        return [pb_utils.InferenceResponse(tensors, parameters=usage(deltas, counted, final=final))]

    def _optional(self, deltas: Sequence[SequenceDelta], prompt_tokens: int) -> list[Any]:
        tensors = [
            self._texts(name, [str(getattr(each, name)) for each in deltas])
            for name in ("finish_reason", "stop_reason")
            if name in self._outputs
        ]
        totals = [each.cumulative_logprob or 0.0 for each in deltas]
        if "cumulative_logprob" in self._outputs:
            tensors.append(self._tensor("cumulative_logprob", totals, np.float32))
        if "log_probs" in self._outputs:
            tensors.append(self._tensor("cum_log_probs", totals, np.float32))
            tensors.append(self._tensor("output_log_probs", _table(deltas), np.float32))
        if "logprobs" in self._outputs:
            tensors.append(self._texts("logprobs", [self._logprobs(each) for each in deltas]))
        if "num_input_tokens" in self._outputs:
            tensors.append(self._tensor("num_input_tokens", [prompt_tokens], np.int32))
        if "num_output_tokens" in self._outputs:
            counts = [each.tokens for each in deltas]
            tensors.append(self._tensor("num_output_tokens", counts, np.int32))
        if "perf_metrics" in self._outputs:
            tensors += self._measured([each.metrics for each in deltas])
        return tensors

    def _logprobs(self, change: SequenceDelta) -> str:
        return contract_logprobs(change.logprobs, self._decode) if self._with_logprobs else "null"

    def _measured(self, metrics: Sequence[Any]) -> list[Any]:
        """The engine's measurements, if they are there."""
        if not metrics or any(each is None for each in metrics):
            return []
        tensors = []
        for name in TIMES:
            times = [getattr(each.timing_metrics, name).total_seconds() * 1e9 for each in metrics]
            tensors.append(self._tensor(f"{name}_ns", times, np.int64))
        for name, field in BLOCKS.items():
            counts = [getattr(each.kv_cache_metrics, field) for each in metrics]
            tensors.append(self._tensor(name, counts, np.int32))
        for name in DRAFTS:
            counts = [getattr(each.speculative_decoding, name) for each in metrics]
            tensors.append(self._tensor(name, counts, np.int32))
        hits = [each.kv_cache_metrics.kv_cache_hit_rate for each in metrics]
        rates = [each.speculative_decoding.acceptance_rate for each in metrics]
        tensors.append(self._tensor("kv_cache_hit_rate", hits, np.float32))
        tensors.append(self._tensor("acceptance_rate", rates, np.float32))
        return tensors

    def _texts(self, name: str, texts: Sequence[str]) -> Any:
        return self._tensor(name, [text.encode() for text in texts], np.object_)

    def _tensor(self, name: str, values: Any, kind: Any) -> Any:
        array = np.array(values, kind)
        return pb_utils.Tensor(name, array[np.newaxis] if self._batched else array)


def usage(deltas: Sequence[SequenceDelta], prompt_tokens: int, *, final: bool) -> dict[str, str]:
    """The response parameter with token counts for the gateway."""
    reason = (deltas[0].finish_reason or "") if final and deltas else ""
    return {USAGE: f"{prompt_tokens},{sum(each.tokens for each in deltas)},{reason}"}


def _table(deltas: Sequence[SequenceDelta]) -> list[list[float]]:
    """One row per sequence, padded with zeros."""
    rows = [[chance.chosen.logprob for chance in each.logprobs] for each in deltas]
    width = max(map(len, rows), default=0)
    return [[*row, *[0.0] * (width - len(row))] for row in rows]
