"""Exceptions of PyTorch in one line, without paths and stacks."""

import pytest

from backends.pytorch.model_file import LONGEST, reason

TRACED = """The following operation failed in the TorchScript interpreter.
Traceback of TorchScript, serialized code (most recent call last):
  File "code/__torch__.py", line 11, in forward
    _0 = ((l).forward(x, ), torch.to(ids, 6))
           ~~~~~~~~~~ <--- HERE

Traceback of TorchScript, original code (most recent call last):
/home/someone/model.py(134): forward
RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5 and 4x3)
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no luck", "no luck"),
        (TRACED, "mat1 and mat2 shapes cannot be multiplied (2x5 and 4x3)"),
        (TRACED.replace("RuntimeError: mat1", "builtins.ValueError: mat1").replace(
            " cannot be multiplied (2x5 and 4x3)", "\nsecond line"), "mat1 and mat2 shapes; second line"),  # noqa: E501
        ("cannot open /home/someone/models/m/1/model.pt: no", "cannot open model.pt: no"),
        ("a/b of 3/4", "a/b of 3/4"),
        ("bad\nException raised from f at /pytorch/c10/x.cpp:12\nframe #0: y", "bad"),
        ("one\n\n two\nthree\nfour", "one; two; three"),
        ("", "RuntimeError"),
    ],
)  # fmt: skip
def test_only_the_reason_of_an_error_is_reported(text: str, told: str) -> None:
    assert reason(RuntimeError(text)) == told


def test_a_long_text_is_cut() -> None:
    assert len(reason(RuntimeError("x" * 10_000))) == LONGEST
