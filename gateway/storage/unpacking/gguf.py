"""Conversion of a GGUF file to bfloat16 safetensors with a tokenizer."""

import json
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
)
from transformers.integrations.gguf import read_gguf_metadata

from gateway.storage.unpacking.process import Report

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def unpack(source: Path, folder: Path, report: Report) -> None:
    """Write the model and the tokenizer that `source` holds into `folder`."""
    report("reading the GGUF", 0.2)
    place = {"gguf_file": source.name, "local_files_only": True}
    config = AutoConfig.from_pretrained(source.parent, **place)

    report("dequantizing", 0.4)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        config=config,
        quantization_config=GgufConfig(dequantize=True),
        dtype="bfloat16",
        **place,
    )

    report("writing", 0.6)
    model.generation_config = _generation_config(config)
    model.save_pretrained(folder)

    report("tokenizer", 0.8)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **place)
    _save_tokenizer(tokenizer, source, folder, config.max_position_embeddings)


def _generation_config(config: Any) -> Any:
    return GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )


def _save_tokenizer(tokenizer: Any, source: Path, folder: Path, max_length: int) -> None:
    _split_as_trained(tokenizer.backend_tokenizer, source)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        # The one name that every version of transformers reads as "do what tokenizer.json says".
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        **{name: getattr(tokenizer, name) for name in SPECIAL_TOKENS},
        "chat_template": tokenizer.chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _split_as_trained(tokenizer: Any, source: Path) -> None:
    """Split text as in the model's training.

    A GGUF only names its pre-tokenizer, and transformers uses GPT-2's for unknown names, such as
    `smollm`, which splits off every digit before GPT-2's rule. Without this "    42" becomes other
    tokens than in training.
    """

    metadata, _ = read_gguf_metadata(str(source))
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
