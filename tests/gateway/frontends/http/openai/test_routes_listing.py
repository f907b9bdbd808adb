"""Cards of `/v1/models`."""

from dataclasses import replace

import pytest

from gateway.frontends.http.openai.routes import cards
from tests.builders import ScriptedInstance, soon
from tests.conftest import Serve
from tests.gateway.frontends.http.openai.conftest import CHAT

NAMED = replace(CHAT, name="named", parameters={"openai_names": '["formal", "org/rude", "chat"]'})


async def test_a_card_has_openais_members_and_vllms(serve: Serve) -> None:
    config = replace(CHAT, parameters={"max_model_len": "8192"})
    model = serve(ScriptedInstance(None), config=config)
    model.loaded_at = 1_700_000_000.9
    assert list(cards([model])) == [
        {
            "id": "chat",
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "sluice",
            "root": "chat",
            "parent": None,
            "max_model_len": 8192,
        }
    ]


@pytest.mark.parametrize("length", ["", "-1", "many"])
async def test_a_length_that_is_no_number_is_not_known(serve: Serve, length: str) -> None:
    config = replace(CHAT, parameters={"max_model_len": length})
    (card,) = cards([serve(ScriptedInstance(None), config=config)])
    assert card["max_model_len"] is None


async def test_the_length_of_an_instance_is_listed(serve: Serve) -> None:
    instance = ScriptedInstance(None)
    instance.adapters, instance.max_model_len = ("odd", "formal"), 512
    parameters = {**NAMED.parameters, "max_model_len": "7"}
    model = serve(instance, config=replace(NAMED, parameters=parameters))
    await soon(model.prepare())
    listed = [(card["id"], card["max_model_len"]) for card in cards([model])]
    assert listed == [(name, 512) for name in ("named", "formal", "org/rude", "chat", "odd")]


async def test_further_names_have_their_model_for_a_parent(serve: Serve) -> None:
    models = [serve(ScriptedInstance(None), config=config) for config in (CHAT, NAMED)]
    found = [(card["id"], card["root"], card["parent"]) for card in cards(models)]
    assert found == [
        ("chat", "chat", None),
        ("named", "named", None),
        ("formal", "named", "named"),
        ("org/rude", "named", "named"),
    ]
