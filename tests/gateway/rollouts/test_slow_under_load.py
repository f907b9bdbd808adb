"""A candidate that is slow only under load loses its requests at the weight where load comes."""

import asyncio

from tests.gateway.rollouts.servers import NumberedBackend, RolloutServer

WORK_SECS = 0.01
CLIENTS = 40
MOST_WAVES = 60
STEPS = [
    {"weight": 10, "for": "10m", "min_requests": 5},
    {"weight": 50, "for": "10m", "min_requests": 5},
    {"weight": 100, "for": "1h"},
]


async def work() -> None:
    await asyncio.sleep(WORK_SECS)


class OneAtATime:
    """The same work, which requests do in turn."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def __call__(self) -> None:
        async with self._turn:
            await work()


async def wave(server: RolloutServer) -> list[str]:
    """The answers to requests of all clients at once."""
    answers = list(await asyncio.gather(*(server.ask() for _ in range(CLIENTS))))
    server.tick()
    return answers


async def test_a_candidate_that_is_slow_under_load_only_is_rolled_back_where_load_comes(
    server: RolloutServer, backend: NumberedBackend
) -> None:
    backend.work = {"1": work, "2": OneAtATime()}
    await server.publish(2, steps=STEPS, guardrails={"slow_first_response": {}})
    while server.rollouts.describe("m")["requests"] < 5:
        assert await server.asked(20) <= {"1", "2"}
        server.tick()
    server.tick(600)
    assert server.place == ("step", 50)
    answers: list[str] = []
    for _ in range(MOST_WAVES):
        answers += await wave(server)
        if server.place[0] != "step":
            break
    assert server.place == ("rolled_back", 0)
    last = server.rollouts.history("m")[-1]
    assert (last.by, last.state) == ("guardrail:slow_first_response", "rolled_back")
    assert set(answers) == {"1", "2"}  # no request has failed, of neither version
    assert set(await wave(server)) == {"1"}
    await server.until_versions("1")
