"""Parts of the load test of fairness: requests at fixed times, clients in turn, key files."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from gateway.policy.key_file import KeyReader
from loadtests.fair_floods import EXCEEDED, draw_waits, histogram_p50, of_overload
from loadtests.support.http_client import Address, post, with_headers
from loadtests.support.results import Line
from loadtests.support.timed_load import Flow, Sent, answered, send
from loadtests.tenants import write_tenants


class Streams(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(503 if self.headers["x-api-key"] == "refused" else 200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in (b"data: 1\n\n", b"data: 2\n\n"):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Write no line."""


@contextmanager
def streaming() -> Iterator[Address]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Streams) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield Address(server.server_address[1])
        server.shutdown()


def test_requests_are_sent_at_their_times_and_refusals_are_noted() -> None:
    with streaming() as address:
        plain = post("/", address, b"{}")
        refused = with_headers(plain, {"x-api-key": "refused"})
        flows = [Flow(50, lambda _: plain), Flow(20, lambda _: refused)]
        good, bad = send(address, flows, 0.2, grace_secs=10)
    assert (len(good), len(bad)) == (11, 5)
    assert all(each.complete and each.events == 2 for each in good)
    assert all(each.first >= each.at for each in good)
    assert all("503" in each.refusal and not each.complete for each in bad)


def test_clients_in_turn_repeat_their_requests_for_a_time() -> None:
    with streaming() as address:
        (found,) = answered(address, [[post("/", address, b"{}")] * 2], 0.3)
    assert len(found) > 2
    assert sum(each.complete for each in found) >= len(found) - 2


def test_a_key_file_has_a_key_and_the_rules_of_each_tenant(tmp_path: Path) -> None:
    keys = write_tenants(tmp_path / "keys.toml", {"a": {"weight": 3.0}, "b": {}})
    listed = KeyReader().read(keys.file.read_text()).keys.values()
    assert sorted(each.tenant for each in listed) == ["a", "b"]


def test_the_median_of_a_histogram_is_the_bound_of_its_bucket() -> None:
    lines = [
        'ratio_bucket{model="m",le="0.5"} 1',
        'ratio_bucket{model="m",le="1"} 3',
        'ratio_bucket{model="m",le="+Inf"} 4',
        'ratio_count{model="m"} 4',
    ]
    assert histogram_p50(lines, "ratio") == 1.0


def test_the_waits_of_an_overload_are_drawn_by_the_second(tmp_path: Path) -> None:
    refused = "503: its first response is expected in 6500 ms, and its deadline is in 5000 ms"
    sent = [Sent(10.0, first=12.0), Sent(10.5, first=14.5), Sent(12.0, refusal=refused)]
    draw_waits(tmp_path / "waits.svg", sent)
    text = (tmp_path / "waits.svg").read_text()
    predicted, real = (each.partition('"')[0] for each in text.split('points="')[1:])
    heights = [
        [float(point.partition(",")[2]) for point in line.split()] for line in (predicted, real)
    ]
    assert heights[0][0] == heights[0][1] > heights[0][2]  # none before the third second
    assert heights[1][0] == heights[1][1] == heights[1][2]  # none after the first one
    assert "wait of admitted requests, s" in text


def test_an_overload_counts_answers_in_time_refusals_and_broken_promises() -> None:
    sent = [
        Sent(10.0, first=10.9, ended=11.0),
        Sent(10.0, first=11.1, ended=11.2),
        Sent(10.0, ended=11.0, refusal=f"504: {EXCEEDED} after 0 tokens"),
        Sent(10.0, ended=10.02, refusal="503: its first response is expected in 6500 ms"),
        Sent(10.0, first=10.03, ended=10.03, refusal='data: {"error":"Request timeout expired"}'),
    ]
    line = Line("overload", "infer")
    found = of_overload(line, sent, capacity=2.0, deadline_secs=1.0)
    assert found[line.other("in time", "of capacity")] == 0.5
    assert 29 < found[line.lower("refusal p99", "ms")] < 31
    assert 66 < found[line.lower("admitted late", "%")] < 67
