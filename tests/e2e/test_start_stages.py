"""The log of a start has the seconds of each stage."""

import re

import pytest

from tests.serving import Serving

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.own_models("loads and unloads"),
]


def test_each_stage_of_an_engines_start_is_a_line(other_server: Serving) -> None:
    stages = [
        r"backend imported model=llama version=1",
        r"process started model=llama of=EngineCore",
        r"process started model=llama of=\S*Worker\S*",
        r"weights loaded model=llama of=\S*Worker\S*",
        r"\"cache made and engine warmed up model=llama of=EngineCore",
        r"instances loaded model=llama version=1 count=1",
        r"model ready model=llama version=1",
    ]
    for stage in stages:
        assert re.search(rf"{stage} secs=[0-9.]+\"", other_server.text), (
            f"{stage}\n{other_server.text}"
        )
