"""One request, and an event before step k of the loop, for every k until its answer."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tests.sweep.holdings import Holdings
from tests.sweep.questions import Outcome, Question
from tests.sweep.server import Server
from tests.sweep.steps import soon
from tests.sweep.ways import Client, Leave, Way

STALL_SECS = 0.003
"""A stall of the loop, after which the messages of a worker arrive together."""
CANCELLED = "Request was cancelled"
REHEARSALS = 3
ENDLESS_STEPS = 70
"""A request without an end has been executed for a while by this step."""
UNFIRED = 3
"""A sweep of every step ends once this many requests in a row were answered before the event."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Events around the request; `crowded`: one request is before it, and one behind it.

    After the event the loop stalls if it is `stalled`.
    """

    leave: Leave
    crowded: bool = False
    stalled: bool = False
    step: int = -1

    def __str__(self) -> str:
        words = [f"{self.leave} at step {self.step}"]
        words += ["crowded"] if self.crowded else []
        words += ["stalled"] if self.stalled else []
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Choice:
    """The part of a sweep that runs: every step, or a sample that the seed determines."""

    seed: str
    every_step: bool = False

    def of(self, scenes: Sequence[Scene], steps: int, limit: int, key: str) -> Iterator[Scene]:
        """The scenes at chosen steps; without `every_step` at most `limit` of them."""
        found = [replace(scene, step=step) for scene in scenes for step in range(steps)]
        if len(found) > limit:
            found = random.Random(f"{self.seed} {key}").sample(found, limit)
        yield from found


@dataclass(slots=True)
class Played:
    """The clients of one scene, once all of them have an answer or have left."""

    fired: bool
    steps: int
    client: Client
    question: Question
    neighbours: Sequence[tuple[Client, Question]]

    def check_neighbours(self) -> None:
        """Each has its own answer, or an error behind a cancelled request of its sequence."""
        for client, question in self.neighbours:
            found, expected = client.outcome(), question.expected
            if question.subject.one_sequence and question.end and self.fired and found.error:
                expected = Outcome(error=CANCELLED)
            assert found == expected, f"the answer of a neighbour: {found}, expected {expected}"

    def check_answer(self) -> None:
        """The request itself has its answer."""
        found, expected = self.client.outcome(), self.question.expected
        assert found == expected, f"the answer of the request: {found}, expected {expected}"

    @property
    def outcomes(self) -> Iterator[tuple[Outcome, Outcome]]:
        """Each answer, and the expected one."""
        for client, question in ((self.client, self.question), *self.neighbours):
            yield client.outcome(), question.expected


async def play(
    server: Server, way: Way, scene: Scene, event: Callable[[Client], None] | None = None
) -> Played:
    """Ask, have the event happen at the scene's step, and wait for every answer.

    The event is by default that the client disconnects.
    """
    loop = server.loop
    clients: list[Client] = []

    def happen() -> None:
        if event is None:
            clients[0].leave(scene.leave)
        else:
            event(clients[0])
        if scene.stalled:
            time.sleep(STALL_SECS)

    *before, asked, behind = server.questions(3) if scene.crowded else (*server.questions(1), None)
    neighbours = [(server.ask_in_process(way, question), question) for question in before]
    clients.append(server.ask(way, asked))
    if behind is not None:
        neighbours.append((server.ask_in_process(way, behind), behind))
    loop.arm(scene.step, happen)
    if server.subject.endless:
        loop.beat()
    await soon(clients[0].answered, f"an answer or an end of the request ({scene})")
    steps, fired = loop.step, scene.step >= 0 and loop.disarm()
    for client, _ in neighbours:
        await soon(client.answered, f"the answer of a neighbour ({scene})")
    return Played(fired, steps, clients[0], asked, neighbours)


async def check_another(server: Server, way: Way) -> None:
    """A second request is answered."""
    question = server.neighbour_question()
    client = server.ask_in_process(way, question)
    await soon(client.answered, "the answer of a second request")
    found, expected = client.outcome(), question.expected
    assert found == expected, f"the answer of a second request: {found}, expected {expected}"


@dataclass(slots=True)
class Ground:
    """Holdings of a server before a sweep, the steps of a request, and the requests since then.

    A request whose client left may be counted late, or never have been read: of all that were
    made at `least` and at `most` these are counted.
    """

    held: Holdings
    steps: int
    least: int
    most: int

    def note(self, played: Played) -> None:
        """Another scene has been played."""
        asked = len(played.neighbours) + 1
        self.most += asked
        self.least += asked - played.fired

    async def settled(self, server: Server) -> None:
        """Wait until nothing of any request is left, and look into the books."""
        await server.settled(self.held)
        counted = server.requests
        assert self.least <= counted <= self.most, (
            f"{counted} requests were counted, expected {self.least} to {self.most}"
        )

    async def check_another(self, server: Server, way: Way) -> None:
        """A second request is answered, and nothing of it is left."""
        await check_another(server, way)
        self.least, self.most = self.least + 1, self.most + 1
        await self.settled(server)
        server.uncounted = self.most - server.requests


async def rehearse(server: Server, way: Way) -> Ground:
    """The ground for a sweep: a few requests without any event have warmed the server up.

    A frontend process may relay a request after its client left: it is counted late, or never.
    """
    steps, endless, most = 0, server.subject.endless, server.requests + server.uncounted
    for crowded in (False, True) * REHEARSALS:
        step = ENDLESS_STEPS if endless else -1
        played = await play(server, way, Scene(Leave.CLOSE, crowded, step=step))
        if not endless:
            played.check_answer()
        played.check_neighbours()
        steps = max(steps, played.steps)
        most += len(played.neighbours) + 1
        await server.idle()
    return Ground(Holdings.now(), steps + 1, server.requests, most)


async def sweep_disconnects(server: Server, way: Way, choice: Choice, limit: int) -> int:
    """Have the client leave at each chosen step; returns the number of scenes."""
    ground = await rehearse(server, way)
    scenes = [
        Scene(leave, crowded, stalled)
        for leave in way.leaves
        for crowded in (False, True)
        for stalled in (False, True)
    ]
    count = 0
    if choice.every_step:
        for scene in scenes:
            count += await _sweep_every_step(server, way, scene, ground)
        return count
    for scene in choice.of(scenes, ground.steps, limit, f"{server.subject} {way}"):
        await disconnect(server, way, scene, ground)
        count += 1
    return count


async def _sweep_every_step(server: Server, way: Way, scene: Scene, ground: Ground) -> int:
    step = unfired = 0
    while unfired < UNFIRED and not (server.subject.endless and step > ENDLESS_STEPS):
        fired = await disconnect(server, way, replace(scene, step=step), ground)
        step, unfired = step + 1, 0 if fired else unfired + 1
    return step


async def disconnect(server: Server, way: Way, scene: Scene, ground: Ground) -> bool:
    """One scene; returns whether the client left before it was answered."""
    try:
        played = await play(server, way, scene)
        ground.note(played)
        if not played.fired:
            played.check_answer()
        played.check_neighbours()
        await ground.settled(server)
        await ground.check_another(server, way)
    except AssertionError as error:
        raise AssertionError(f"{server.subject}, {way}, {scene}: {error}") from error
    return played.fired


def chosen(seed: str, names: Iterable[str], count: int) -> frozenset[str]:
    """That many of the names."""
    return frozenset(random.Random(seed).sample(sorted(names), count))
