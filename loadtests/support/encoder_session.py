"""The rate of ONNX Runtime without a server, an upper limit for every server."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
import orjson

from loadtests.support.rounds import LoadTestFailed

TOKEN_BUDGETS = (128, 256, 512, 1024, 2048)
"""Batch sizes to try, in padded tokens."""
OUTPUT = "sentence_embedding"

Ids = Sequence[int]


def best_rate(onnx: Path, threads: int, sentences: Sequence[Ids]) -> float:
    """Sentences per second at the best batch size, in a process of its own."""
    client = subprocess.run(
        [sys.executable, "-m", __name__, str(onnx), str(threads)],
        input=orjson.dumps(list(sentences)),
        capture_output=True,
        check=False,
    )
    if client.returncode:
        raise LoadTestFailed(f"ONNX Runtime alone failed:\n{client.stderr.decode()}")
    return max(map(float, client.stdout.split()))


def main() -> None:
    """Print sentences per second of each batch size; the sentences come as JSON."""
    onnx, threads = sys.argv[1:]
    sentences = sorted(orjson.loads(sys.stdin.buffer.read()), key=len)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(threads)
    session = onnxruntime.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
    session.run([OUTPUT], _inputs(sentences[:8]))
    for budget in TOKEN_BUDGETS:
        began = time.perf_counter()
        for batch in _batches(sentences, budget):
            session.run([OUTPUT], _inputs(batch))
        sys.stdout.write(f"{len(sentences) / (time.perf_counter() - began)}\n")


def _batches(sentences: Sequence[Ids], budget: int) -> Iterator[Sequence[Ids]]:
    """Neighbours in length, as many as fit the budget."""
    batch: list[Ids] = []
    for each in sentences:
        if batch and len(each) * (len(batch) + 1) > budget:
            yield batch
            batch = []
        batch.append(each)
    yield batch


def _inputs(batch: Sequence[Ids]) -> dict[str, npt.NDArray[np.int64]]:
    shape = (len(batch), max(map(len, batch)))
    ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, each in enumerate(batch):
        ids[row, : len(each)] = each
        mask[row, : len(each)] = 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros(shape, np.int64)}


if __name__ == "__main__":
    main()
