"""Receipts of `/v1/embeddings` of a model without the contract, whose texts are requests."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gateway.admission.admission import Admission
from gateway.dataplane import DataPlane
from gateway.frontends.http.app import build_app
from gateway.frontends.http.openai.embeddings import TextReceipts
from gateway.observability.receipt import Receipt
from gateway.observability.receipts import Receipts
from gateway.policy.tenants import TenantRules, Tenants
from tests.builders import LoadedModels, soon
from tests.conftest import Serve
from tests.gateway.frontends.http.conftest import Open
from tests.gateway.frontends.http.openai.conftest import ENCODER, body
from tests.gateway.frontends.http.openai.test_embeddings import LARGE, PATH, EncoderInstance

PART = re.compile(r"([a-z_]+);dur=([0-9.]+)")
HEADER = {"x-want-timing": "1"}
PARTS = ["recv", "decode", "batch", "input", "infer", "output", "encode", "total"]


class Served:
    """A server with the model `encoder`."""

    def __init__(self, serve: Serve, connect: Open, *, every: bool = False, **more: Any) -> None:
        self.model = serve(EncoderInstance(), config=replace(ENCODER, **more))
        loaded: Any = LoadedModels(self.model)
        self.dataplane = DataPlane(loaded, receipts=Receipts(every=every))
        self._connect = connect

    async def ask(
        self, given: Any, headers: dict[str, str] | None = None, **members: Any
    ) -> httpx.Response:
        client = self._connect(build_app(self.dataplane, LARGE, "triton"))
        content = body(model="encoder", input=given, **members)
        return await soon(client.post(PATH, content=content, headers=headers))

    def why(self, answer: httpx.Response) -> Any:
        return self.dataplane.receipts.why("", answer.headers["x-request-id"])


def parts_of(answer: httpx.Response) -> dict[str, float]:
    found = {name: float(ms) for name, ms in PART.findall(answer.headers["server-timing"])}
    assert round(sum(ms for name, ms in found.items() if name != "total"), 3) == found["total"]
    found.pop("texts", None)  # one text may end before, or after, another one
    return found


@pytest.mark.parametrize("given", ["a", ["a", "abc"], ["a"] * 300])
async def test_an_answer_has_the_receipt_that_its_client_asks_for(
    serve: Serve, connect: Open, given: Any
) -> None:
    served = Served(serve, connect)
    for wish in ({"headers": HEADER}, {"timing": True}, {"nvext": {"extra_fields": ["timing"]}}):
        answer = await served.ask(given, **wish)
        assert answer.status_code == 200
        assert list(parts_of(answer)) == PARTS
        account = served.why(answer)
        assert (account["model"], account["status"]) == ("encoder", "ok")
    without = await served.ask(given)
    assert "server-timing" not in without.headers
    assert served.why(without) is None


async def test_every_answer_of_a_server_has_one(serve: Serve, connect: Open) -> None:
    served = Served(serve, connect, every=True)
    assert list(parts_of(await served.ask(["a", "b"]))) == PARTS


async def test_the_text_that_fails_is_that_of_the_receipt(serve: Serve, connect: Open) -> None:
    served = Served(serve, connect)
    answer = await served.ask(["a", "bad one", "c"], HEADER)
    assert answer.status_code == 400
    assert list(parts_of(answer)) == PARTS
    assert served.why(answer)["status"] == "failed: 'bad one' is too long"


async def test_texts_that_are_tried_again_are_not_refused(serve: Serve, connect: Open) -> None:
    """The model accepts three at a time: the fourth waits for one of them."""
    served = Served(serve, connect, parameters={"max_in_flight": "3"})
    answer = await served.ask(["a"] * 20, HEADER)
    assert list(parts_of(answer)) == PARTS
    assert served.why(answer)["status"] == "ok"


@pytest.mark.parametrize(("answered", "expected"), [(3, 0), (2, 2), (1, 1)])
def test_the_text_that_ended_last_or_failed_is_that_of_the_receipt(
    answered: int, expected: int
) -> None:
    whole = Receipt(1, 2)
    texts = TextReceipts(whole)
    records = [SimpleNamespace(submitted_ns=at, ended_ns=ns) for at, ns in ((3, 9), (4, 5), (5, 7))]
    for record in records:
        texts.begin()
        texts.begin().record = record  # type: ignore[assignment] # stands in for one
    texts.end(answered)
    assert whole.record is records[expected]
    assert whole.texts_ns == (3 if expected else 0)


async def test_the_wait_for_the_texts_before_is_a_part(serve: Serve, connect: Open) -> None:
    """The model takes one text at a time, so the last one waits for all others."""
    served = Served(serve, connect, parameters={"max_in_flight": "1"})
    answer = await served.ask(["a"] * 50, HEADER)
    parts = dict(PART.findall(answer.headers["server-timing"]))
    assert list(parts) == [*PARTS[:2], "texts", *PARTS[2:]]
    assert float(parts["texts"]) > float(parts["infer"])


async def test_refused_texts_have_a_receipt_of_their_refusal(serve: Serve, connect: Open) -> None:
    served = Served(serve, connect)
    rules = TenantRules(requests_per_minute=2.0)
    served.dataplane.admission = Admission(Tenants({"": rules}))
    answer = await served.ask(["a", "b", "c"], HEADER)
    assert answer.status_code == 429
    assert list(parts_of(answer)) == ["recv", "decode", "encode", "total"]
    assert served.why(answer)["status"].startswith("refused: tenant '' may use 2 requests at once")
