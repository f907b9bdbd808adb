"""Events before step k but disconnects: an instance is lost, a model changes, the server stops."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from tests.sweep.holdings import Holdings
from tests.sweep.routed_server import RoutedServer
from tests.sweep.server import Server
from tests.sweep.stage import Stage
from tests.sweep.steps import Hang, soon, until
from tests.sweep.sweep import Choice, Ground, Played, Scene, check_another, play, rehearse
from tests.sweep.ways import Leave, Way

UNLOADED = (
    "Request for unknown model: '{0}' has no available versions",
    "The model `{0}` does not exist.",
)
"""The errors of a request for a model that was unloaded: Triton's, and OpenAI's."""

Sweep = Callable[[Server, Way, Scene, Ground], Coroutine[Any, Any, bool]]


async def sweep(stage: Stage, choice: Choice, limit: int, scene_of: Sweep) -> int:
    """Have an event happen at each chosen step of each way in; returns the number of scenes.

    Without `every_step` that is `limit` scenes of all ways.
    """
    count = 0
    rng = random.Random(f"{choice.seed} {stage.subject} {scene_of.__name__}")
    ways = stage.ways if choice.every_step else rng.sample(stage.ways, min(limit, len(stage.ways)))
    for way in ways:
        server = await stage.server()
        ground = await rehearse(server, way)
        scenes = [Scene(Leave.CLOSE, crowded, stalled) for crowded, stalled in AROUND]
        key = f"{stage.subject} {way} {scene_of.__name__}"
        most = len(scenes) * ground.steps if choice.every_step else -(-limit // len(ways))
        for scene in choice.of(scenes, ground.steps, most, key):
            try:
                await scene_of(server, way, scene, ground)
            except AssertionError as error:
                await stage.replace()
                raise AssertionError(f"{stage.subject}, {way}, {scene}: {error}") from error
            count += 1
    return count


AROUND = ((False, False), (True, False), (True, True))


async def lose(server: Server, way: Way, scene: Scene, ground: Ground) -> bool:
    """Every instance ends; the requests have an answer or an error, and another is served."""
    played = await play(server, way, scene, lambda _: server.lose_instances())
    check_each(played, lambda error: bool(error))
    await server.recovered()
    await server.settled(ground.held)
    await check_another(server, way)
    await server.settled(ground.held)
    return played.fired


async def disconnect_replica(server: Server, way: Way, scene: Scene, ground: Ground) -> bool:
    """The router loses its replica; the requests have an answer or an error, and it reconnects."""
    assert isinstance(server, RoutedServer)
    played = await play(server, way, scene, lambda _: server.lose_connection())
    check_each(played, bool)
    await until(lambda: server.reconnected, lambda: "the replica is connected again")
    await server.settled(ground.held)
    await check_another(server, way)
    await server.settled(ground.held)
    return played.fired


async def reload(server: Server, way: Way, scene: Scene, ground: Ground) -> bool:
    """The model is loaded again; no request fails."""
    played = await _during(server, way, scene, server.reload)
    played.check_answer()
    played.check_neighbours()
    await until(lambda: server.ready, lambda: "the model is ready")
    await server.settled(ground.held)
    await check_another(server, way)
    await server.settled(ground.held)
    return played.fired


async def unload(server: Server, way: Way, scene: Scene, ground: Ground) -> bool:
    """The model is unloaded; a request is answered or finds no model, and later ones find none."""
    played = await _during(server, way, scene, server.unload)

    def finds_none(error: str) -> bool:
        return any(text.format(server.subject.name) in error for text in UNLOADED)

    check_each(played, finds_none)
    if played.fired:
        question = server.question()
        client = server.ask_in_process(way, question)
        await soon(client.answered, "the answer of a request for an unloaded model")
        assert finds_none(client.outcome().error), client.outcome()
        await server.settled(ground.held)
        await server.reload()
    await until(lambda: server.ready, lambda: "the model is ready")
    await server.settled(ground.held)
    await check_another(server, way)
    await server.settled(ground.held)
    return played.fired


async def load_version(server: Server, way: Way, scene: Scene, ground: Ground) -> bool:
    """Another version is loaded alone, and unloaded afterwards; no request fails."""
    played = await _during(server, way, scene, server.load_other)
    played.check_answer()
    played.check_neighbours()
    await check_another(server, way)
    if played.fired:
        await soon(server.unload_other(), "the end of an unload", 60)
    return await _settled_alone(played, server, way, ground)


async def roll_back(server: Server, way: Way, scene: Scene, ground: Ground) -> bool:
    """A candidate with half of the requests is rolled back; no request fails."""
    await soon(server.begin_rollout(), "the begin of a rollout", 60)
    played = await play(server, way, scene, lambda _: server.roll_back())
    played.check_answer()
    played.check_neighbours()
    if not played.fired:
        server.roll_back()
    return await _settled_alone(played, server, way, ground)


async def _settled_alone(played: Played, server: Server, way: Way, ground: Ground) -> bool:
    await server.alone()
    await server.settled(ground.held)
    await check_another(server, way)
    await server.settled(ground.held)
    return played.fired


async def stop(stage: Stage, way: Way, scene: Scene, outside: Holdings) -> bool:
    """The server stops; it ends within its limit, and nothing of it is left."""
    server = await stage.server()
    played = await play(server, way, scene, lambda _: server.begin_stop())
    await stage.end()
    check_each(played, bool)

    def left() -> Iterator[str]:
        return outside.exceeded(of_pools=True)

    await until(lambda: not any(left()), lambda: f"left behind by the server: {'; '.join(left())}")
    return played.fired


async def sweep_stops(stage: Stage, choice: Choice, limit: int) -> int:
    """Have the server stop at each chosen step; each scene has a server of its own."""
    rng = random.Random(f"{choice.seed} {stage.subject} stop")
    ways = stage.ways if choice.every_step else rng.sample(stage.ways, min(limit, len(stage.ways)))
    count = 0
    for way in ways:
        ground = await rehearse(await stage.server(), way)
        await stage.end()
        outside = Holdings.now()
        scenes = [Scene(Leave.CLOSE, crowded, stalled) for crowded, stalled in AROUND]
        most = len(scenes) * ground.steps if choice.every_step else 1
        for scene in choice.of(scenes, ground.steps, most, f"{stage.subject} {way} stop"):
            try:
                await stop(stage, way, scene, outside)
            except (AssertionError, Hang) as error:
                await stage.replace()
                raise AssertionError(f"{stage.subject}, {way}, {scene}: {error}") from error
            count += 1
    return count


async def _during(
    server: Server, way: Way, scene: Scene, change: Callable[[], Coroutine[Any, Any, None]]
) -> Played:
    """Play a scene whose event begins a change, and wait for the end of that change too."""
    begun: list[asyncio.Task[None]] = []
    played = await play(
        server, way, scene, lambda _: begun.append(server.loop.create_task(change()))
    )
    for task in begun:
        await soon(task, "the end of a load or an unload", 60)
    return played


def check_each(played: Played, allowed: Callable[[str], bool]) -> None:
    """Each request has its whole answer, or an allowed error behind a part of it."""
    for found, expected in played.outcomes:
        if found.error:
            assert allowed(found.error), f"{found}, expected {expected}"
            assert found.texts == expected.texts[: len(found.texts)], f"{found}, {expected}"
        else:
            assert found == expected, f"{found}, expected {expected}"
