"""A model of a fleet on Ray without replicas: the first request starts one."""

from collections.abc import Iterator

import httpx
import pytest

from tests.conformance.models import REPEAT, with_parameters
from tests.fleet.nodes import LOST_SECS, Fleet, RayNodes
from tests.serving import Serving, running, wait_until, write_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

STREAM = "/v2/models/repeat/generate_stream"
READY = "/v2/models/repeat/ready"
ZERO = {"replicas": "0..1", "scale_to_zero_secs": 1, "replica_resources": '{"CPU": 0.25}'}
BODY = {"text_input": "x", "n": 3, "delay_us": 0}


@pytest.fixture(scope="module")
def fleet(nodes: RayNodes) -> Fleet:
    return Fleet("zero", nodes.address)


@pytest.fixture(scope="module")
def router(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    models = tmp_path_factory.mktemp("zero") / "models"
    write_model(models, "repeat", REPEAT + with_parameters(ZERO))
    flags = ("--fleet=ray", f"--fleet-name={fleet.name}", "--http-first-response-secs=0.1")
    comments = ("--http-keep-alive-secs=0.2",)
    with running(Serving(models, (*flags, *comments), fleet.environment)) as found:
        yield found
        fleet.command("down")
    assert "Traceback" not in found.text


def test_a_model_goes_to_zero_and_a_stream_waits_for_its_first_replica(
    router: Serving, fleet: Fleet
) -> None:
    with httpx.Client(base_url=router.http, timeout=LOST_SECS) as http:
        # It has a replica once, so that routers know the model.
        wait_until(lambda: http.get(READY).is_success, "the model is known", LOST_SECS)
        fleet.wait_replicas("repeat", 0)
        assert http.get(READY).is_success
        with http.stream("POST", STREAM, json=BODY) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines[0] == ": waiting for the model"
        assert sum(line.startswith("data:") for line in lines) == 3
        fleet.wait_replicas("repeat", 0)
