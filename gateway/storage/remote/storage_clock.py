"""The time of a storage, by the `Date` of its answers."""

import http.client
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

KEPT_S = 3600
"""The clock is asked again after this: clocks drift by a second per day."""
ANSWER_S = 2


class StorageClock:
    """The storage's time, asked for by one unsigned HEAD per hour.

    Obstore shows no headers. Modification times are the storage's, and this machine may be wrong.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked_at = -float("inf")
        self._date: datetime | None = None

    def now(self, url: str) -> datetime | None:
        """The time at the storage of this URL; None if it did not answer."""
        with self._lock:
            # Not this machine's time of day, which may be set meanwhile.
            passed = time.monotonic() - self._asked_at
            if passed > KEPT_S:
                self._date, self._asked_at, passed = _date(url), time.monotonic(), 0
            return self._date and self._date + timedelta(seconds=passed)


def _date(url: str) -> datetime | None:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_S)
    try:
        connection.request("HEAD", parts.path or "/")
        found = parsedate_to_datetime(connection.getresponse().headers["Date"])
    except (OSError, http.client.HTTPException, TypeError, ValueError):
        return None
    finally:
        connection.close()
    return found.astimezone(UTC)
