"""Limits of one client: connections of its address, its pace, the ratio of its compression."""

import asyncio
import logging
from typing import Any

import pytest

from gateway import process_limits
from gateway.client_limits import ConnectionLimits, most_decompressed, pace_due


class Connection(asyncio.Transport):
    """A connection of an address, with a descriptor that is not one of the reserve."""

    def __init__(self, address: Any) -> None:
        super().__init__({"peername": (address, 1) if isinstance(address, str) else address})
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def dropped(limits: ConnectionLimits, *addresses: Any) -> list[bool]:
    """Whether each new connection is dropped; all of them stay open."""
    found = [Connection(each) for each in addresses]
    closed = [limits.drops(each) for each in found]
    assert [each.is_closed for each in found] == closed
    return closed


def test_an_address_has_a_limited_number_of_connections() -> None:
    limits = ConnectionLimits(2)
    assert dropped(limits, *["192.0.2.1"] * 3, "192.0.2.2") == [False, False, True, False]


def test_a_connection_that_has_ended_makes_room() -> None:
    limits = ConnectionLimits(1)
    first, second = Connection("192.0.2.1"), Connection("192.0.2.1")
    assert (limits.drops(first), limits.drops(second)) == (False, True)
    limits.ended(second)
    assert dropped(limits, "192.0.2.1") == [True]
    limits.ended(first)
    limits.ended(first)
    assert dropped(limits, "192.0.2.1", "192.0.2.1") == [False, True]


def test_a_network_of_ipv6_is_one_client() -> None:
    limits = ConnectionLimits(1)
    same = ("2001:db8::1", "2001:db8::2:1", "2001:db8:0:0:ffff::")
    assert dropped(limits, *same, "2001:db8:0:1::1") == [False, True, True, False]
    link_local = ("fe80::1%eth0", 1, 0, 2)
    assert dropped(limits, link_local, link_local) == [False, True]
    mapped = ("::ffff:192.0.2.1", "::ffff:192.0.2.2")
    assert dropped(limits, *mapped, mapped[0]) == [False, False, True]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "", None])
def test_this_machine_and_clients_without_an_address_have_no_limit(address: Any) -> None:
    peer = b"/run/socket" if address == "" else address
    assert dropped(ConnectionLimits(1), *[peer] * 3) == [False] * 3


def test_0_is_no_limit() -> None:
    assert dropped(ConnectionLimits(0), *["192.0.2.1"] * 300) == [False] * 300


def test_dropped_connections_are_one_line_of_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = ConnectionLimits(1)
    with caplog.at_level(logging.WARNING):
        dropped(limits, *["192.0.2.1"] * 5)
    (line,) = [each for each in caplog.records if each.getMessage() == "connections dropped"]
    assert vars(line).items() >= {"address": "192.0.2.1", "max_per_address": 1}.items()


def test_without_descriptors_a_connection_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_limits.DescriptorReserve, "drops", lambda self, transport: True)
    limits = ConnectionLimits(1)
    assert limits.drops(Connection("192.0.2.1"))
    monkeypatch.undo()
    assert dropped(limits, "192.0.2.1") == [False]


def test_a_body_has_ten_seconds_or_the_longest_pause_and_a_second_for_each_kibibyte() -> None:
    assert pace_due(5.0, 0, 60.0) == 65.0
    assert pace_due(5.0, 2048, 3.0) == 17.0


def test_compressed_data_may_grow_a_hundredfold_or_to_64_mebibytes() -> None:
    sizes = [most_decompressed(size) for size in (0, 10_000, 1 << 20)]
    assert sizes == [64 << 20, 64 << 20, 100 << 20]
