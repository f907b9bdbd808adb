"""Settings of the engine in `model.json`, and the place of its model."""

import json
from pathlib import Path
from typing import Any

import pytest

from backends.vllm.settings import (
    NOWHERE,
    EngineModel,
    check_names,
    hide_folders,
    read_engine_model,
)
from gateway.backend import ModelContext
from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest


class Repository:
    """A version folder and a model store on disk."""

    def __init__(self, root: Path) -> None:
        self.version = root / "repository" / "llama" / "1"
        self.store = root / "store"
        self.version.mkdir(parents=True)

    def write(self, text: str) -> None:
        (self.version / "model.json").write_text(text)

    def add_model(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")

    def read(self, config: ModelConfig | None = None, **arguments: Any) -> EngineModel:
        if arguments:
            self.write(json.dumps(arguments))
        return read_engine_model(self.context(config or ModelConfig(name="llama")))

    def refusal(self, config: ModelConfig | None = None, **arguments: Any) -> str:
        with pytest.raises(InferenceError) as caught:
            self.read(config, **arguments)
        assert caught.value.code is Code.INVALID_ARG
        assert str(self.version.parent) not in caught.value.message
        return caught.value.message

    def context(self, config: ModelConfig) -> ModelContext:
        def infer(_: InferRequest) -> Any:
            raise AssertionError("reading a file asks no model")

        return ModelContext(
            config=config, path=self.version, store=self.store, infer=infer, wasted=lambda _: None
        )


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def on_gpus(*gpus: int) -> ModelConfig:
    group = InstanceGroup(kind=InstanceKind.KIND_GPU, gpus=gpus)
    return ModelConfig(name="llama", instance_group=(group,))


def test_arguments_pass_through_untouched(repository: Repository) -> None:
    given = {"model": "org/name", "enforce_eager": "true", "seed": "5", "unheard_of": [1]}
    model = repository.read(**given)
    assert model.arguments == given | {"allowed_media_domains": [NOWHERE]}
    assert not model.local


def test_the_version_folder_comes_before_the_store(repository: Repository) -> None:
    repository.add_model(repository.store / "tiny")
    assert repository.read(model="tiny").arguments["model"] == str(repository.store / "tiny")
    repository.add_model(repository.version / "tiny")
    assert repository.read(model="tiny").arguments["model"] == str(repository.version / "tiny")


def test_a_model_that_is_nowhere_is_vllms_to_find(repository: Repository) -> None:
    model = repository.read(model="tiny")
    assert model.arguments["model"] == "tiny"
    assert "neither a folder of its version folder nor in the model store" in model.whereabouts
    assert "(run: sluice fetch tiny)" in model.whereabouts
    assert "fetch" not in repository.read(model="org/tiny").whereabouts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "the key 'model' is missing"),
        ('{"model": 5}', "the key 'model' is missing or no string"),
    ],
)
def test_a_file_of_another_form_is_refused(repository: Repository, text: str, said: str) -> None:
    repository.write(text)
    assert said in repository.refusal()


def test_a_missing_file_is_named_with_its_version(repository: Repository) -> None:
    assert repository.refusal() == "model 'llama': its version folder 1 has no model.json"


def test_several_gpus_need_an_instance_of_kind_model(repository: Repository) -> None:
    said = repository.refusal(on_gpus(0), model="m", tensor_parallel_size=2)
    assert "must be KIND_MODEL (found KIND_GPU)" in said
    assert "name 2 GPUs" in repository.refusal(on_gpus(0, 1), model="m")
    group = InstanceGroup(kind=InstanceKind.KIND_MODEL)
    config = ModelConfig(name="llama", instance_group=(group,))
    assert repository.read(config, model="m", tensor_parallel_size=2)


def test_the_gpu_of_the_instance_group_is_the_engines(repository: Repository) -> None:
    assert repository.read(on_gpus(3), model="m").arguments["device_ids"] == [3]
    assert repository.read(on_gpus(3), model="m", device_ids=[1]).arguments["device_ids"] == [1]
    assert "device_ids" not in repository.read(on_gpus(), model="m").arguments


def test_an_engine_can_be_given_its_own_cores(repository: Repository) -> None:
    def cores(text: str) -> ModelConfig:
        return ModelConfig(name="llama", parameters={"cpu_cores": text})

    assert repository.read(cores("0-2,8"), model="m").cpu_cores == {0, 1, 2, 8}
    assert repository.read(model="m").cpu_cores == frozenset()
    assert "'cpu_cores' is 'all'" in repository.refusal(cores("all"), model="m")


def test_an_unknown_key_is_refused_with_names_like_it() -> None:
    check_names({"seed": 1}, {"seed"}, model="llama")
    with pytest.raises(InferenceError) as caught:
        check_names({"enforce_eger": True}, {"enforce_eager", "seed"}, model="llama")
    assert caught.value.message == (
        "model 'llama': its model.json has the key 'enforce_eger', which vLLM does not know; did "
        "you mean 'enforce_eager'?"
    )


def test_messages_show_no_path_of_the_host() -> None:
    folders = {"/srv/models": "the model store", "/srv/models/tiny": "tiny"}
    text = "no /srv/models/tiny in /srv/models, see /opt/x/y.py and https://host/a/b or org/name"
    assert hide_folders(text, folders) == (
        "no tiny in the model store, see <path> and https://host/a/b or org/name"
    )
    assert hide_folders("no '/opt/my llm/x' for \"tiny\"", folders) == "no '<path>' for \"tiny\""
