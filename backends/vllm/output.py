"""What has the engine added to a request, in the terms of the text contract?"""

from typing import Any

import orjson
from vllm.outputs import EmbeddingRequestOutput, PoolingRequestOutput

from gateway.generation import Delta


def read_output(output: Any, *, logprobs: bool) -> list[Delta]:
    """One delta for each sequence of `output`; `logprobs` says whether anybody reads them."""
    if isinstance(output, PoolingRequestOutput):
        return [Delta(_embedding(output), 0)]
    return [
        Delta(
            completion.text,
            len(completion.token_ids),
            completion.index,
            completion.finish_reason,
            completion.cumulative_logprob,
            _logprobs(completion.logprobs) if logprobs else "null",
        )
        for completion in output.outputs
    ]


def failed(output: Any) -> bool:
    """Whether the engine has given the request up."""
    if isinstance(output, PoolingRequestOutput):
        return output.error is not None
    return any(completion.finish_reason == "error" for completion in output.outputs)


def count_tokens(output: Any) -> int:
    """How many tokens an output holds that nobody has read."""
    if output is None or isinstance(output, PoolingRequestOutput):
        return 0
    return sum(len(completion.token_ids) for completion in output.outputs)


def _logprobs(positions: Any) -> str:
    if positions is None:
        return "null"
    told = [
        {
            str(token): {
                "logprob": chance.logprob,
                "rank": chance.rank,
                "decoded_token": chance.decoded_token,
            }
            for token, chance in position.items()
        }
        for position in positions
    ]
    return orjson.dumps(told).decode()


def _embedding(output: PoolingRequestOutput) -> str:
    vector = EmbeddingRequestOutput.from_base(output).outputs.embedding
    return orjson.dumps(vector).decode()
