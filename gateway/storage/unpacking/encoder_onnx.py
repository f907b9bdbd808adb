"""How does the sentence encoder become one ONNX file with dynamic batch and length?"""

from pathlib import Path

import torch

from gateway.storage.unpacking.sentence_encoder import (
    INPUTS,
    OUTPUTS,
    SentenceEncoder,
    example,
    save_tokenizer,
)
from gateway.storage.unpacking.worker import Report

OPSET = 17


def unpack(source: Path, folder: Path, report: Report) -> None:
    """Write `model.onnx` and `tokenizer.json` into `folder`; `source` is the file of weights."""
    report("loading the weights", 0.5)
    # Plain attention: fused into few operators, while the other kind guards against NaN rows.
    encoder = SentenceEncoder(source.parent, attention="eager")
    report("exporting to ONNX", 0.6)
    _export(encoder, folder / "model.onnx")
    report("tokenizer", 0.95)
    save_tokenizer(source.parent, folder)


def _export(encoder: SentenceEncoder, path: Path) -> None:
    """Export by tracing, which torch calls deprecated, for its result and its time.

    ONNX Runtime 1.31 makes SkipLayerNormalization of what the newer exporter writes, which on a CPU
    takes several times as long as the sum and the LayerNormalization it stands for: batches take up
    to a fifth longer. `onnxruntime.transformers` writes it too. And tracing takes 2 seconds, the
    newer exporter 7. model_repository/README.md has the figures.
    """
    sentence = {0: "batch", 1: "length"}
    embedding, hidden = OUTPUTS
    with torch.inference_mode():
        torch.onnx.export(
            encoder,
            example(),
            str(path),
            dynamo=False,
            opset_version=OPSET,
            input_names=list(INPUTS),
            output_names=list(OUTPUTS),
            dynamic_axes=dict.fromkeys((*INPUTS, hidden), sentence) | {embedding: {0: "batch"}},
        )
