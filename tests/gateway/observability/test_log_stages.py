"""A stage that takes time has a line with its seconds."""

import logging
import time

import pytest

from gateway.observability.log import logged_stage

log = logging.getLogger("sluice.test")


def test_a_stage_is_logged_with_its_seconds_where_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sluice")
    with logged_stage(log, "weights loaded", model="m"):
        time.sleep(0.15)
    (record,) = caplog.records
    assert (record.getMessage(), record.__dict__["model"]) == ("weights loaded", "m")
    assert record.__dict__["secs"] >= 0.1
    assert record.filename == "test_log_stages.py"


def break_after(secs: float) -> None:
    time.sleep(secs)
    raise OSError("broken")


def test_a_short_or_failed_stage_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sluice")
    with logged_stage(log, "weights loaded"):
        pass
    with pytest.raises(OSError, match="broken"), logged_stage(log, "weights loaded"):
        break_after(0.15)
    assert caplog.records == []
