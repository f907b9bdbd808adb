"""A Llama of one layer with the real model's tokenizer and its answer to one question.

A step of it takes a hundredth of a step of the real model. Weights are not trained but written:

- The output of a token is a row of random signs; a state that points along a row chooses its token.
- Each token of the answer points along the row of the next one.
- Any other token points where the attention does, at a random sum of the tokens before it. So every
  text has its own continuation, without meaning. The subject of the question outweighs the others,
  and points at the first token of the answer.
"""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

SUBJECT = " France"
ANSWER = "The capital of France is Paris."
END = "<|im_end|>"

LAYERS, WIDTH, HEAD = 1, 128, 64
"""The number of layers, the width of a state, and of one head of the attention."""
CODE = 96
"""The part of a state that chooses a token; the rest names the token itself."""
IS_SUBJECT, CONSTANT = CODE, WIDTH - 1
NAME = slice(CODE + 1, CONSTANT)

OUTPUT = 0.12
"""With a temperature of 1 a token of the answer has odds of five to one against all others."""
SURE = 100.0
"""The length of a state that the attention does not change."""
OWN = 1.0
"""The length that any other token adds, so that no text repeats one token."""
PAST, SUBJECTS_NAME, SUBJECTS_PAST = 1.0, 25.0, 100.0
"""Additions of the attention for a token and for the subject, before it takes their mean."""
REPEATED, SEPARATOR, CLOSER = -5.0, -3.0, 0.35
"""The odds of blanks and digits, of commas, and of quotes: a text that follows a grammar ends."""

Array = NDArray[np.float32]

SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": HEAD,
    "head_dim": HEAD,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": WIDTH // HEAD,
    "num_key_value_heads": WIDTH // HEAD,
    "tie_word_embeddings": False,
}
GGUF_SIZES = {
    "llama.block_count": LAYERS,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": HEAD,
    "llama.attention.head_count": WIDTH // HEAD,
    "llama.attention.head_count_kv": WIDTH // HEAD,
}
LAYER = "model.layers.0."
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "blk.0.attn_norm",
    "post_attention_layernorm": "blk.0.ffn_norm",
    "self_attn.q_proj": "blk.0.attn_q",
    "self_attn.k_proj": "blk.0.attn_k",
    "self_attn.v_proj": "blk.0.attn_v",
    "self_attn.o_proj": "blk.0.attn_output",
    "mlp.gate_proj": "blk.0.ffn_gate",
    "mlp.up_proj": "blk.0.ffn_up",
    "mlp.down_proj": "blk.0.ffn_down",
}
MOSTLY_F16 = 1


def write_one_layer(folder: Path, real: Path) -> Path:
    """Write the model into `folder`, with the tokenizer and settings of the `real` one."""
    from safetensors.numpy import save_file

    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(real / file, folder)
    config = json.loads((real / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **SIZES, "dtype": "float32"}))
    weights = _weights(Tokenizer.from_file(str(real / "tokenizer.json")))
    save_file(weights, folder / "model.safetensors")
    return folder


def write_one_layer_gguf(file: Path, real: Path, tokenizer: Path) -> None:
    """Write the same as a GGUF, with the metadata of the `real` one; it has that tokenizer."""
    from gguf import GGUFReader, GGUFWriter

    from gateway.storage.unpacking.gguf_q8 import OF_THE_WRITER

    writer = GGUFWriter(file, "llama")
    writer.add_file_type(MOSTLY_F16)
    for field in GGUFReader(real).fields.values():
        if field.name not in OF_THE_WRITER:
            kind, *inner = field.types
            value = GGUF_SIZES.get(field.name, field.contents())
            writer.add_key_value(field.name, value, kind, sub_type=inner[-1] if inner else None)
    for name, weight in _weights(Tokenizer.from_file(str(tokenizer))).items():
        part = name.removeprefix(LAYER).removesuffix(".weight")
        matrix = weight.astype(np.float16) if weight.ndim > 1 else weight
        writer.add_tensor(f"{GGUF_NAMES[part]}.weight", matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _weights(tokenizer: Tokenizer) -> dict[str, Array]:
    random = np.random.default_rng(1)
    codes = _codes(tokenizer, random)
    (subject,) = tokenizer.encode(SUBJECT).ids
    answer = tokenizer.encode(ANSWER).ids
    embedding = np.zeros((len(codes), WIDTH), np.float32)
    embedding[:, :CODE] = OWN * _unit(random.normal(size=(len(codes), CODE)))
    embedding[:, NAME] = _unit(random.normal(size=embedding[:, NAME].shape))
    embedding[:, CONSTANT] = 1
    for token, successor in pairwise([*answer, tokenizer.token_to_id(END)]):
        embedding[token] = 0
        embedding[token, :CODE] = SURE * _unit(codes[successor, :CODE])
    embedding[subject, IS_SUBJECT] = SUBJECTS_NAME

    values = np.zeros((WIDTH, WIDTH), np.float32)
    names = values[:CODE, NAME]
    names[:] = random.normal(0, PAST / CODE**0.5, names.shape)
    values[:CODE, IS_SUBJECT] = SUBJECTS_PAST * _unit(codes[answer[0], :CODE])
    keys = random.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32)
    nothing = np.zeros((WIDTH, WIDTH), np.float32)
    return {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(WIDTH, np.float32),
        "lm_head.weight": codes,
        f"{LAYER}input_layernorm.weight": np.ones(WIDTH, np.float32),
        f"{LAYER}post_attention_layernorm.weight": np.ones(WIDTH, np.float32),
        f"{LAYER}self_attn.q_proj.weight": nothing,
        f"{LAYER}self_attn.k_proj.weight": keys,
        f"{LAYER}self_attn.v_proj.weight": values,
        f"{LAYER}self_attn.o_proj.weight": np.eye(WIDTH, dtype=np.float32),
        f"{LAYER}mlp.gate_proj.weight": nothing[:HEAD],
        f"{LAYER}mlp.up_proj.weight": nothing[:HEAD],
        f"{LAYER}mlp.down_proj.weight": nothing[:, :HEAD].copy(),
    }


def _codes(tokenizer: Tokenizer, random: np.random.Generator) -> Array:
    """The row of each token; tokens of the format have none, but for the end."""
    size = tokenizer.get_vocab_size()
    codes = np.zeros((size, WIDTH), np.float32)
    codes[:, :CODE] = random.choice((-OUTPUT, OUTPUT), (size, CODE))
    for token, text in enumerate(tokenizer.decode_batch([[token] for token in range(size)])):
        codes[token, CONSTANT] = _odds(text.strip())
    for token in tokenizer.get_added_tokens_decoder():
        codes[token] *= token == tokenizer.token_to_id(END)
        codes[token, CONSTANT] = 0
    return codes


def _odds(text: str) -> float:
    if not text or text.isdigit():
        return REPEATED
    return SEPARATOR if "," in text else CLOSER if text == '"' else 0


def _unit(rows: Any) -> Any:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)
