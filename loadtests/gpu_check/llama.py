"""A Llama that is made here: a few layers of random weights, and a vocabulary of our prompts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from loadtests.gpu_check.asked import CUDA, Asked
from loadtests.prompts import WORDS

NAME = "tiny"
UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
PROMPTED = (UNKNOWN, BEGIN, END, "Words", ":", *dict.fromkeys(WORDS))
VOCABULARY = (*PROMPTED, *(f"word{number}" for number in range(len(PROMPTED), 4096)))
"""What prompts are made of, and as many words more as a small model's vocabulary has."""
LONGEST = 16384
GIB = 1 << 30
CONFIG = """
backend: "vllm"
instance_group [ { kind: KIND_MODEL } ]
"""


def write_repository(folder: Path, asked: Asked) -> Path:
    """A repository with the model NAME of backend vllm, whose weights lie in its version."""
    version = folder / NAME / "1"
    _write_model(version / NAME)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    (version / "model.json").write_text(json.dumps(_arguments(asked)))
    return folder


def engine_arguments(repository: Path, asked: Asked) -> Mapping[str, Any]:
    """What an engine alone is started with, to serve the same."""
    return {**_arguments(asked), "model": str(repository / NAME / "1" / NAME)}


def _arguments(asked: Asked) -> Mapping[str, Any]:
    on_gpu = asked.device == CUDA
    return {
        "model": NAME,
        "dtype": "bfloat16",
        "max_model_len": LONGEST,
        "max_num_seqs": max(8, *asked.streams),
        "kv_cache_memory_bytes": 4 * GIB if on_gpu else GIB // 2,
        # Without these a CPU would compile for minutes; on a GPU they are what is measured.
        **({} if on_gpu else {"enforce_eager": True, "max_num_batched_tokens": 2048}),
    }


def _write_model(folder: Path) -> None:
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        bos_token_id=VOCABULARY.index(BEGIN),
        eos_token_id=VOCABULARY.index(END),
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token=UNKNOWN, bos_token=BEGIN, eos_token=END
    ).save_pretrained(folder)
