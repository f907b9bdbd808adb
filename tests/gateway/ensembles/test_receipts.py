"""The receipt of a request to an ensemble, with those of its members."""

from gateway.observability.receipt import receipt_of
from gateway.observability.receipts import Receipts
from tests.builders import read_all, settle, soon, text_request
from tests.conftest import Serve
from tests.gateway.ensembles.chains import chain
from tests.gateway.ensembles.test_backend import fork


async def test_the_members_of_a_fork_have_receipts_and_the_last_ones_are_its_chain(
    serve: Serve,
) -> None:
    """`a`, then `b` and `c` side by side, of which `b` ends last, then `join`."""
    ensemble = fork(serve)
    request = Receipts().begin(text_request("x", model="e"), 0, 0, wished=True)
    receipt = receipt_of(request)
    assert receipt is not None
    with ensemble.model.submit(request) as stream:
        (await ensemble["a"].begun()).finish("from a")
        c, b = await ensemble["c"].begun(), await ensemble["b"].begun()
        c.finish("from c")
        await settle()
        b.finish("from b")
        (await ensemble["join"].begun()).finish("joined")
        assert await soon(read_all(stream)) == ["joined"]
    receipt.sent()
    found = receipt.described()
    members = {each["model"]: each for each in found["calls"]}
    assert [name for name, each in members.items() if each["longest"]] == ["a", "b", "join"]
    assert all(
        {"batch", "input", "infer", "output", "total"} <= each.keys() for each in members.values()
    )


async def test_members_of_a_request_without_a_receipt_have_none(serve: Serve) -> None:
    ensemble = chain(serve)
    with ensemble.ask("x") as stream:
        for name in "ab":
            execution = await ensemble[name].begun()
            assert execution.requests[0].receipt is None
            execution.finish(name)
        assert await soon(read_all(stream)) == ["b"]
