"""Locust users of `generate_stream`: time to first token, inter-token latency and tokens/s.

Rows of the statistics: `ttft` and `inter-token` are milliseconds; `token` is one entry per token,
so its requests/s are tokens/s; `generate_stream` is the whole stream.
"""

import secrets
import time
from argparse import ArgumentParser
from dataclasses import dataclass, field
from typing import Any

import orjson
from locust import HttpUser, events, task

from loadtests.support.generation import prompts

KIND = "SSE"
EVENT = b"data: "


@events.init_command_line_parser.add_listener
def add_flags(parser: ArgumentParser, **_: Any) -> None:
    """The flags of a request; each can also be set in the environment."""
    flag: Any = parser.add_argument  # Locust's parser also takes `env_var`
    flag("--model", default="llama", env_var="SLUICE_MODEL", help="model to ask")
    flag("--max-tokens", type=int, default=64, env_var="SLUICE_MAX_TOKENS", help="per answer")
    flag("--api-key", default="", env_var="SLUICE_API_KEY", is_secret=True, help="of the server")
    flag("--prompt-words", type=int, default=32, env_var="SLUICE_PROMPT_WORDS", help="per prompt")


class GenerateStreamUser(HttpUser):
    """A user with one stream after another."""

    def on_start(self) -> None:
        """Give each user prompts of its own, new ones in each run."""
        options = self.environment.parsed_options
        self._prompts = prompts(options.prompt_words, seed=secrets.randbits(32))
        self._path = f"/v2/models/{options.model}/generate_stream"
        if options.api_key:
            self.client.headers["Authorization"] = f"Bearer {options.api_key}"
        self._sampling = {"max_tokens": options.max_tokens, "temperature": 0, "ignore_eos": True}

    @task
    def generate_stream(self) -> None:
        """Read one stream, and report its times to Locust's statistics."""
        question = {
            "text_input": next(self._prompts),
            "stream": True,
            "return_num_output_tokens": True,
            "parameters": self._sampling,
        }
        deltas = Deltas(began=time.perf_counter())
        with self.client.post(
            self._path, json=question, name="generate_stream", stream=True, catch_response=True
        ) as response:
            if response.status_code != 200:
                response.failure(response.text)
                return
            # urllib3 returns each chunk of a chunked body at its arrival.
            for line in response.iter_lines():
                if line.startswith(EVENT):
                    deltas.take(orjson.loads(line[len(EVENT) :]), time.perf_counter())
            response.request_meta["response_time"] = deltas.secs * 1e3
            if deltas.error:
                response.failure(deltas.error)
        deltas.report(self.environment.events.request)


@dataclass(slots=True)
class Deltas:
    """The events of one stream, and their times in seconds of one clock."""

    began: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    error: str = ""

    @property
    def secs(self) -> float:
        """Seconds from the request to the last token."""
        return self.arrivals[-1][0] - self.began if self.arrivals else 0.0

    def take(self, event: dict[str, Any], now: float) -> None:
        """Record one event."""
        self.error = event.get("error", self.error)
        if tokens := event.get("num_output_tokens", 0):
            self.arrivals.append((now, tokens))

    def report(self, request: Any) -> None:
        """Report to Locust: one `ttft`, an `inter-token` and a `token` for each token."""
        before = self.began
        for number, (arrived, tokens) in enumerate(self.arrivals):
            # The tokens of one event share the time since the event before.
            name, times = ("inter-token", tokens) if number else ("ttft", 1)
            for _ in range(times):
                _fire(request, name, (arrived - before) / times)
            for _ in range(tokens):
                _fire(request, "token", (arrived - before) / tokens)
            before = arrived


def _fire(request: Any, name: str, secs: float) -> None:
    request.fire(
        request_type=KIND,
        name=name,
        response_time=secs * 1e3,
        response_length=0,
        exception=None,
        context={},
    )
