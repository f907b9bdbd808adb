"""Options of models in memory."""

import argparse

import pytest

from gateway.flags.memory import gpu_size, memory_size
from gateway.flags.models import add_flags, model_settings
from gateway.memory_settings import ModelMemory


def parse(*options: str) -> ModelMemory:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return model_settings(parser.parse_args(["--model-repository=m", *options])).memory


def test_options_of_memory_become_settings() -> None:
    assert parse() == ModelMemory()
    given = ("--on-demand", "--model-memory=24GiB", "--max-resident-models=3")
    found = parse(*given, "--gpu-memory=0:70GiB", "--gpu-memory=1:512MiB")
    gpus = {0: 70 << 30, 1: 512 << 20}
    assert found == ModelMemory(on_demand=True, host=24 << 30, models=3, gpus=gpus)


@pytest.mark.parametrize("text", ["", "0", "0GiB", "12GB", "-1", "1.5GiB", "GiB"])
def test_a_size_needs_a_whole_number_with_a_known_unit(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        memory_size(text)


@pytest.mark.parametrize("text", ["70GiB", "a:70GiB", ":70GiB"])
def test_a_size_of_a_gpu_needs_its_number(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="GPU:SIZE"):
        gpu_size(text)
