"""How does the sentence encoder become a package of torch.export?"""

from pathlib import Path

import torch

from gateway.storage.unpacking.sentence_encoder import (
    INPUTS,
    SentenceEncoder,
    example,
    save_tokenizer,
)
from gateway.storage.unpacking.worker import Report


def unpack(source: Path, folder: Path, report: Report) -> None:
    """Write `model.pt2` and `tokenizer.json` into `folder`; `source` is the file of weights.

    The package holds the graph and the weights: it needs no compiler, unlike AOTInductor's.
    """
    report("loading the weights", 0.5)
    encoder = SentenceEncoder(source.parent, attention="sdpa")
    report("exporting", 0.6)
    torch.export.save(_export(encoder), folder / "model.pt2")
    report("tokenizer", 0.95)
    save_tokenizer(source.parent, folder)


def _export(encoder: SentenceEncoder) -> torch.export.ExportedProgram:
    sentence = {
        0: torch.export.Dim("batch", min=1),
        1: torch.export.Dim("length", min=1, max=encoder.longest),
    }
    with torch.no_grad():
        return torch.export.export(encoder, example(), dynamic_shapes=(sentence,) * len(INPUTS))
