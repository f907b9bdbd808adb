"""What joins the gateway and one worker: two channels, and the segments of both ends."""

from dataclasses import dataclass

from backends.python.channel import Channel
from backends.python.requests import to_json
from backends.python.worker.sluice_worker.messages import ToWorker
from backends.python.worker.sluice_worker.segments import IncomingSegments, OutgoingSegments


@dataclass(frozen=True, slots=True)
class Link:
    """Closed as one."""

    work: Channel
    control: Channel
    incoming: IncomingSegments
    outgoing: OutgoingSegments

    def release(self) -> None:
        """Tell the worker which of its segments nobody looks at any more, and which ours went."""
        freed, dropped = self.incoming.take_released(), self.outgoing.take_dropped()
        if freed or dropped:
            self.control.send(to_json([ToWorker.RELEASED, freed, dropped]))

    def close(self) -> None:
        """Let go of everything; views of the worker's segments stay good."""
        self.work.close()
        self.control.close()
        self.incoming.close()
        self.outgoing.close()
