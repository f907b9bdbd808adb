"""Room that several share: it is given back, and never more is taken than there is."""

import pytest

from gateway.frontends.grpc.room import Room, Share
from gateway.frontends.grpc.rpc import RpcError, Status


def test_what_there_is_can_be_taken_and_one_byte_more_can_not() -> None:
    share = Share(Room(10))
    share.add(10)
    with pytest.raises(RpcError) as caught:
        share.add(1)
    assert caught.value.status is Status.RESOURCE_EXHAUSTED
    assert share.held == 10


def test_what_one_gives_back_another_can_take() -> None:
    room = Room(10)
    one, other = Share(room), Share(room)
    one.add(4)
    one.add(6)
    one.clear()
    other.add(10)
    assert (one.held, other.held) == (0, 10)


def test_a_share_changes_to_more_and_to_less() -> None:
    room = Room(10)
    one, other = Share(room), Share(room)
    one.change(10)
    one.change(3)
    other.add(7)
    with pytest.raises(RpcError):
        one.change(4)
    assert one.held == 3


def test_giving_back_twice_gives_nothing() -> None:
    room = Room(10)
    share = Share(room)
    share.add(5)
    share.clear()
    share.clear()
    with pytest.raises(RpcError):
        Share(room).add(11)
