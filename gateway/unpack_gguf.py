"""How does a GGUF become bfloat16 safetensors with a tokenizer? Runs as a process of its own.

    python unpack_gguf.py SOURCE.gguf FOLDER

A process, because torch and transformers then give their memory back, and an interrupt is a kill.
It tells its steps on stdout, one JSON object per line, and ends when its stdin closes: whoever
started it holds the other end, so it never outlives its parent.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = ("starting transformers", "reading the GGUF", "dequantizing", "writing", "tokenizer")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

Report = Callable[[str], None]


def main() -> None:
    """Unpack the file in the first argument into the folder in the second."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    unpack(source, folder, _reporter())


def unpack(source: Path, folder: Path, report: Report) -> None:
    """Write the model and the tokenizer that `source` holds into `folder`."""
    report(STEPS[0])
    # Imported here so that the first step is told before the seconds that this takes.
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    report(STEPS[1])
    place = {"gguf_file": source.name, "local_files_only": True}
    config = AutoConfig.from_pretrained(source.parent, **place)

    report(STEPS[2])
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        config=config,
        quantization_config=GgufConfig(dequantize=True),
        dtype="bfloat16",
        **place,
    )

    report(STEPS[3])
    model.generation_config = _generation_config(config)
    model.save_pretrained(folder)

    report(STEPS[4])
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **place)
    _save_tokenizer(tokenizer, source, folder, config.max_position_embeddings)


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _reporter() -> Report:
    # What libraries print, in C too, goes to stderr from now on and never mixes with the reports.
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def report(step: str) -> None:
        done = STEPS.index(step) / len(STEPS)
        stdout.write(json.dumps({"step": step, "done": done}) + "\n")
        stdout.flush()

    return report


def _generation_config(config: Any) -> Any:
    from transformers import GenerationConfig

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
    """Split text as the model learned it.

    A GGUF only names its way of splitting, and transformers takes GPT-2's for a name that it does
    not know. `smollm` is such a name: it cuts out every digit before GPT-2's rule sees the text.
    Without this "    42" becomes other tokens than the model was trained on.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers.integrations.gguf import read_gguf_metadata

    metadata, _ = read_gguf_metadata(str(source))
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )


if __name__ == "__main__":
    main()
