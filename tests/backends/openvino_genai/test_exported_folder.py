"""A folder as `optimum-cli export openvino` writes it."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.llama import ANSWER, FRANCE, GREEDY, QUESTION, Llama, stored_folder
from tests.one_layer import write_one_layer_gguf
from tests.serving import serving, write_model

pytestmark = [pytest.mark.vllm, pytest.mark.release, pytest.mark.timeout(300)]

OTHER_ENDS, PARIS = (0, 2), 7042
OF_TRANSFORMERS = ("config.json", "generation_config.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def exported(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of one layer as a graph, and the tokenizer of transformers."""
    for package in ("transformers", "openvino_tokenizers"):
        pytest.importorskip(package)
    original = stored_folder()
    folder = tmp_path_factory.mktemp("exported")
    _save_graph(gguf, original / "tokenizer.json", folder)
    _save_tokenizer(original, folder)
    for name in OF_TRANSFORMERS:
        shutil.copy(original / name, folder)
    return folder


def _save_graph(gguf: Path, tokenizer: Path, folder: Path) -> None:
    genai: Any = importlib.import_module("openvino_genai")
    file = folder / "model.gguf"
    write_one_layer_gguf(file, gguf, tokenizer)
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = 1
    genai.ContinuousBatchingPipeline(
        str(file),
        scheduler_config=scheduler,
        device="CPU",
        properties={"enable_save_ov_model": True},
    )
    file.unlink()


def _save_tokenizer(original: Path, folder: Path) -> None:
    openvino: Any = importlib.import_module("openvino")
    tokenizers: Any = importlib.import_module("openvino_tokenizers")
    transformers: Any = importlib.import_module("transformers")
    own = transformers.AutoTokenizer.from_pretrained(original)
    tokenizer, detokenizer = tokenizers.convert_tokenizer(own, with_detokenizer=True)
    openvino.save_model(tokenizer, str(folder / "openvino_tokenizer.xml"))
    openvino.save_model(detokenizer, str(folder / "openvino_detokenizer.xml"))


@pytest.fixture
def repository(exported: Path, tmp_path: Path) -> Path:
    repository = tmp_path / "repository"
    write_model(repository, "llama", 'backend: "openvino_genai"\n')
    settings = '{"model": "weights", "num_kv_blocks": 300}'
    (repository / "llama" / "1" / "model.json").write_text(settings)
    shutil.copytree(exported, repository / "llama" / "1" / "weights")
    return repository


def test_it_answers_as_the_gguf_it_is_made_of(repository: Path) -> None:
    with serving(repository) as server, Llama(server) as llama:
        assert llama.generate(**FRANCE)["text_output"] == ANSWER
        long = llama.post("/generate", {"text_input": "word " * 9000})
        assert "the prompt has 9001 tokens, expected at most 8191" in long.json()["error"]


def test_a_text_ends_at_each_of_the_models_ends(repository: Path) -> None:
    settings = repository / "llama" / "1" / "weights" / "generation_config.json"
    ends = {"eos_token_id": [*OTHER_ENDS, PARIS]}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **ends}))
    asked = {"messages": QUESTION, "return_finish_reason": True}
    with serving(repository) as server, Llama(server) as llama:
        found = llama.generate(**asked, parameters=GREEDY)
        assert (found["text_output"], found["finish_reason"]) == (
            "The capital of France is",
            "stop",
        )
        shown = llama.generate(**asked, parameters={**GREEDY, "include_stop_str_in_output": True})
        assert shown["text_output"] == "The capital of France is Paris"
        ignored = llama.generate(**asked, parameters={**GREEDY, "ignore_eos": True})
        assert ignored["text_output"].startswith(ANSWER)
        assert ignored["finish_reason"] == "length"
