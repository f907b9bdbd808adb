"""How many bytes may all connections together make a server hold?"""

from gateway.frontends.grpc.rpc import RpcError, Status

FULL = "the server holds as much of messages that are not whole, or not taken, as it may"


class Room:
    """What messages on their way may take, whoever sends them."""

    def __init__(self, size_bytes: int) -> None:
        self._free = size_bytes

    def take(self, size: int) -> None:
        """Hold so many bytes more; RpcError if there is no room for them."""
        if size > self._free:
            raise RpcError(Status.RESOURCE_EXHAUSTED, FULL)
        self._free -= size

    def give(self, size: int) -> None:
        """So many bytes are held no longer."""
        self._free += size


class Share:
    """What one RPC, or one connection, has of the room."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self.held = 0

    def add(self, size: int) -> None:
        """Hold so many bytes more; RpcError if there is no room for them."""
        self._room.take(size)
        self.held += size

    def change(self, size: int) -> None:
        """Hold so many bytes, instead of those before."""
        self.add(size - self.held)

    def clear(self) -> None:
        """Hold nothing."""
        if self.held:
            self._room.give(self.held)
            self.held = 0
