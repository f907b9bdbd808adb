"""Log lines of grpc.aio for the tasks of methods."""

import logging

import grpc
import pytest

from gateway.frontends.grpc.grpcio_transport import RUNNERS


@pytest.mark.parametrize(
    ("error", "told"),
    [(grpc.aio.InternalError("a status that was not sent"), False), (KeyError("a defect"), True)],
)
def test_only_unexpected_errors_are_logged(
    caplog: pytest.LogCaptureFixture, error: Exception, told: bool
) -> None:
    with caplog.at_level(logging.ERROR, logger=RUNNERS.name):
        RUNNERS.error("raised by a method", exc_info=error)
    assert bool(caplog.records) is told
