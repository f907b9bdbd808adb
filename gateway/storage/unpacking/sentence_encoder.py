"""all-MiniLM-L6-v2 as one module: token ids in, the embedding of the sentence out."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import BertModel

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
OUTPUTS = ("sentence_embedding", "last_hidden_state")
MODULES = ("Transformer", "Pooling", "Normalize")

SMALLEST_SUM = 1e-9
"""What sentence-transformers divides by where no token is attended to."""


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
