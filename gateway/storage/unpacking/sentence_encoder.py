"""The sentence encoder all-MiniLM-L6-v2, exported to ONNX or as a package of torch.export."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import BertModel

from gateway.storage.unpacking.process import Report

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
OUTPUTS = ("sentence_embedding", "last_hidden_state")
MODULES = ("Transformer", "Pooling", "Normalize")

SMALLEST_SUM = 1e-9
"""The divisor of sentence-transformers for a sentence without attended tokens."""


OPSET = 17


class SentenceEncoder(torch.nn.Module):  # type: ignore[misc]  # torch is not followed: Any
    """Answers `sentence_embedding` [batch, 384] and `last_hidden_state` [batch, length, 384].

    The embedding is the mean over the tokens whose attention mask is 1, of length 1.
    """

    def __init__(self, folder: Path, attention: str) -> None:
        """Load the weights in `folder`; `attention` names an implementation of transformers."""
        super().__init__()
        _insist_on_mean_pooling(folder)
        self.bert = BertModel.from_pretrained(
            folder, attn_implementation=attention, add_pooling_layer=False, local_files_only=True
        )
        self.longest: int = self.bert.config.max_position_embeddings
        self.eval()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.bert(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
        ).last_hidden_state
        attended = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * attended).sum(1) / attended.sum(1).clamp(min=SMALLEST_SUM)
        return torch.nn.functional.normalize(mean, dim=1), hidden


def example() -> tuple[torch.Tensor, ...]:
    """Inputs to export with: two sentences of seven tokens, one of them padded."""
    ids = torch.arange(2000, 2014).reshape(2, 7)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return ids * mask, mask, torch.zeros_like(ids)


def save_tokenizer(source: Path, folder: Path) -> None:
    """Write tokenizer.json: cut at the length the model was trained for, nothing padded.

    The file of the package pads every sentence to 128 tokens, which is what batching undoes.
    """
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(_json(source / "sentence_bert_config.json")["max_seq_length"])
    tokenizer.save(str(folder / "tokenizer.json"))


def _insist_on_mean_pooling(folder: Path) -> None:
    modules = tuple(each["type"].rpartition(".")[2] for each in _json(folder / "modules.json"))
    modes = _json(folder / "1_Pooling" / "config.json")
    pooling = [mode for mode, used in modes.items() if mode.startswith("pooling_mode") and used]
    if modules != MODULES or pooling != ["pooling_mode_mean_tokens"]:
        raise ValueError(f"found {modules} with {pooling}, expected {MODULES} with mean pooling")


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def unpack_onnx(source: Path, folder: Path, report: Report) -> None:
    """Write `model.onnx` and `tokenizer.json` into `folder`; `source` is the file of weights."""
    report("loading the weights", 0.5)
    # Plain attention: fused into few operators, while the other kind guards against NaN rows.
    encoder = SentenceEncoder(source.parent, attention="eager")
    report("exporting to ONNX", 0.6)
    _export_onnx(encoder, folder / "model.onnx")
    report("tokenizer", 0.95)
    save_tokenizer(source.parent, folder)


def _export_onnx(encoder: SentenceEncoder, path: Path) -> None:
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


def unpack_torch(source: Path, folder: Path, report: Report) -> None:
    """Write `model.pt2` and `tokenizer.json` into `folder`; `source` is the file of weights.

    The package holds the graph and the weights: it needs no compiler, unlike AOTInductor's.
    """
    report("loading the weights", 0.5)
    encoder = SentenceEncoder(source.parent, attention="sdpa")
    report("exporting", 0.6)
    torch.export.save(_export_torch(encoder), folder / "model.pt2")
    report("tokenizer", 0.95)
    save_tokenizer(source.parent, folder)


def _export_torch(encoder: SentenceEncoder) -> torch.export.ExportedProgram:
    sentence = {
        0: torch.export.Dim("batch", min=1),
        1: torch.export.Dim("length", min=1, max=encoder.longest),
    }
    with torch.no_grad():
        return torch.export.export(encoder, example(), dynamic_shapes=(sentence,) * len(INPUTS))
