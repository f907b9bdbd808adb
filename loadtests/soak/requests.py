"""Requests of the soak's models on each wire, checks of their answers, and counts."""

import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import orjson
from tritonclient.grpc import service_pb2 as pb

from loadtests.soak.models import Form, Model, Trouble

TEXT = "soak"
MOST_LENGTH = 16
FEW = 40
TEXTS = 3
LARGE = (2**12, 2**16, 2**18, 2**20)
"""Floats of a large request; as JSON it has up to ten times as many bytes."""


class Wrong(Exception):
    """An answer that no act explains; the text has it."""


class Refused(Exception):
    """The server refused a request: `code` is the wire's, the text is the server's."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code} {text}")
        self.code = code
        self.text = text


class Route(Enum):
    """The endpoints of HTTP."""

    INFER = "infer"
    GENERATE = "generate"
    STREAM = "generate_stream"
    CHAT = "chat/completions"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request; its answer has its `number`, so an exchanged answer is noticed."""

    model: Model
    number: int
    id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> Sequence[int]:
        """The shape of `x`; those of `padded` and `large` differ in length."""
        if self.model.name == "padded":
            return (1, 1 + self.number % MOST_LENGTH)
        if self.model.name == "large":
            return (LARGE[self.number % len(LARGE)],)
        return self.model.shape

    @property
    def value(self) -> int:
        """The value of `x`; a model with a cache gets equal ones."""
        return self.number % FEW if self.model.few else self.number

    @property
    def words(self) -> str:
        """The text that a model of texts repeats."""
        return f"a {self.number} z"


def routes(model: Model) -> Sequence[Route]:
    """The routes of a model."""
    if model.form is Form.OPENAI:
        return (Route.CHAT, Route.COMPLETIONS)
    if model.form is Form.EMBEDDING:
        return (Route.EMBEDDINGS,)
    if model.responses:
        return (Route.STREAM,)
    return (Route.INFER,) if model.sequences else (Route.INFER, Route.GENERATE, Route.STREAM)


def path(question: Question, route: Route) -> str:
    """The path of a request."""
    if question.model.form in (Form.OPENAI, Form.EMBEDDING):
        return f"/v1/{route.value}"
    return f"/v2/models/{question.model.name}/{route.value}"


def body(question: Question, route: Route) -> bytes:
    """The JSON of a request."""
    if route is Route.INFER:
        return orjson.dumps(_infer(question))
    given: dict[str, Any] = {"id": question.id} if question.id else {}
    form = question.model.form
    if form is Form.NUMBER:
        data = _data(question)
        given |= {"x": data if len(data) > 1 else data[0]}
    elif form is Form.TEXT:
        given |= {"text_input": question.words, "n": question.model.responses, "delay_us": 200}
    elif form is Form.CHAT:
        given |= {"messages": orjson.dumps(_said(question)).decode()}
    elif form is Form.EMBEDDING:
        given = {"model": question.model.name, "input": [question.words] * TEXTS}
    elif route is Route.CHAT:
        given = {"model": question.model.name, "messages": _said(question)}
    else:
        given = {"model": question.model.name, "prompt": question.words}
    return orjson.dumps(given | dict(question.parameters))


def _infer(question: Question) -> Mapping[str, Any]:
    tensor = {
        "name": "x",
        "datatype": "FP32",
        "shape": question.shape,
        "data": _data(question),
    }
    named = {"id": question.id} if question.id else {}
    return {**named, "parameters": question.parameters, "inputs": [tensor]}


def _data(question: Question) -> list[float]:
    return [float(question.value)] * int(np.prod(question.shape))


def _said(question: Question) -> list[Mapping[str, str]]:
    return [{"role": "user", "content": question.words}]


def check_infer(question: Question, answer: bytes) -> None:
    """Wrong unless `y` of an infer response is `x`."""
    found = orjson.loads(answer)["outputs"][0]["data"]
    if found != _data(question):
        raise Wrong(f"infer answered {found[:4]}, expected {_data(question)[:4]}")


def check_generated(question: Question, answers: Sequence[Mapping[str, Any]]) -> None:
    """Wrong unless the events of a stream, or one answer of generate, are those of the request."""
    expected = max(1, question.model.responses)
    if len(answers) != expected:
        raise Wrong(f"{len(answers)} events, expected {expected}")
    for number, answer in enumerate(answers):
        _check_event(question, number, answer)


def _check_event(question: Question, number: int, answer: Mapping[str, Any]) -> None:
    form = question.model.form
    if form is Form.NUMBER:
        found = answer["y"] if isinstance(answer["y"], list) else [answer["y"]]
        wrong = any(each != question.value for each in (found[0], found[-1]))
    else:
        expected = question.words if form is Form.TEXT else f"{question.words.split()[number]} "
        found = answer["text_output"]
        wrong = found != expected
    if wrong:
        raise Wrong(f"event {number} has {str(found)[:60]}, expected {question.words!r}")


def check_openai(question: Question, answers: Sequence[Mapping[str, Any]]) -> None:
    """Wrong unless the words of an answer, or of its chunks, are those of the request."""
    said = "".join(_openai_text(choice) for answer in answers for choice in answer["choices"])
    if said.split() != question.words.split():
        raise Wrong(f"the words are {said!r}, expected {question.words!r}")


def check_embeddings(question: Question, answer: bytes) -> None:
    """Wrong unless each text has the embedding with the number of the request."""
    found = [each["embedding"][0] for each in orjson.loads(answer)["data"]]
    if found != [question.number] * TEXTS:
        raise Wrong(f"the embeddings are of {found}, expected {TEXTS} of {question.number}")


def _openai_text(choice: Mapping[str, Any]) -> str:
    holder = choice.get("message") or choice.get("delta") or choice
    return str(holder.get("content") or holder.get("text") or "")


def message(question: Question, **parameters: object) -> Any:
    """The message of gRPC."""
    request = pb.ModelInferRequest(model_name=question.model.name, id=question.id)
    form = question.model.form
    if form is Form.NUMBER:
        request.inputs.add(name="x", datatype="FP32", shape=question.shape)
        request.raw_input_contents.append(np.array(_data(question), np.float32).tobytes())
    elif form is Form.TEXT:
        _add_text(request, "text_input", question.words)
        for name, value in (("n", question.model.responses), ("delay_us", 200)):
            request.inputs.add(name=name, datatype="INT32", shape=[1])
            request.raw_input_contents.append(np.int32(value).tobytes())
    elif form is Form.CHAT:
        _add_text(request, "messages", orjson.dumps(_said(question)).decode())
    elif form is Form.EMBEDDING:
        _add_text(request, "text", question.words, shape=(1, 1))
    else:
        _add_text(request, "openai_request", body(question, Route.CHAT).decode())
    for key, value in {**question.parameters, **parameters}.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(request.parameters[key], kind, value)
    return request


def _add_text(request: Any, name: str, text: str, shape: Sequence[int] = (1,)) -> None:
    raw = text.encode()
    request.inputs.add(name=name, datatype="BYTES", shape=shape)
    request.raw_input_contents.append(len(raw).to_bytes(4, "little") + raw)


def check_message(question: Question, number: int, answer: Any) -> None:
    """Wrong unless a response is the one of that number to this request."""
    raw = answer.raw_output_contents[0]
    form = question.model.form
    if form in (Form.NUMBER, Form.EMBEDDING):
        found = np.frombuffer(raw, np.float32)
        if not len(found) or (found != question.value).any():
            raise Wrong(f"the response has {found[:4]}, expected {question.value}")
    elif form is Form.OPENAI:
        check_openai(question, [orjson.loads(raw[4:])])
    else:
        text = raw[4:].decode()
        _check_event(question, number, {"text_output": text})


UNAVAILABLE = frozenset({"503", "UNAVAILABLE"})
CANCELLED = re.compile("cancelled|CANCELLED|canceled", re.IGNORECASE)
DROPPED = "--resumable-buffer-size"
"""An event that was dropped because its stream exceeded the buffer."""

EXPIRED = "no such stream to continue"
"""A client whose frontend was killed may resume late."""

LOST = re.compile(
    r"replica [0-9a-f]{16} was lost (while it executed the request; it may have had effects|after )"
)
"""Requests at a replica that was killed, unless another one executes or continues them."""

LOSS_SECS = 5.0
"""Clients have read the refusals of a killed replica's requests after this time."""

SEQUENCE = re.compile("sequence|correlation|Request was cancelled", re.IGNORECASE)
"""Requests of a sequence end with the one before them."""

UNREACHABLE = ", and its deadline is in "
"""A predicted wait is longer than the time that a client gives."""
LIMITS = re.compile("Request timeout expired|Exceeds maximum queue size|exceeds maximum queue")
GONE = re.compile(
    r"unknown model|is not ready|unloaded|no (available|ready) version|not found|is being restarted"
    r"|has no available versions|unavailable|Stub process|given up|does not serve"
)
NUMBERS = re.compile(r"\d[\d.]*")
MOST_SURPRISES = 20


@dataclass(slots=True)
class Tally:
    """`asked`, `answered` and `refused` are requests by model, `acts` are counted by name.

    A request whose client disconnected counts as asked alone.
    """

    asked: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    acts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    surprises: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    cuts: bool = False
    """Connections may end any time: frontends were killed, or the server stops."""

    lost_at: float = -math.inf
    """The time when a replica of the server was last killed: its requests may end."""

    def ask(self, question: Question) -> None:
        """Count a request, of which a part at least was sent."""
        self.asked[question.model.name] += 1

    def answer(self, question: Question) -> None:
        """Count a correct answer."""
        self.answered[question.model.name] += 1

    def refuse(
        self, question: Question, refusal: Refused, *, stopped: bool = False, timed: bool = False
    ) -> None:
        """Count a refusal; its client cancelled a `stopped` request, a `timed` one is due early."""
        model = question.model
        self.refused[model.name] += 1
        self.refusals[f"{refusal.code} {NUMBERS.sub('N', refusal.text)[:100]}"] += 1
        cut = self.cuts and (refusal.code == "UNAVAILABLE" or EXPIRED in refusal.text)
        asked_for = stopped and CANCELLED.search(refusal.text)
        lost = time.monotonic() < self.lost_at + LOSS_SECS and LOST.search(refusal.text)
        late = timed and UNREACHABLE in refusal.text
        if not (cut or asked_for or lost or late or explained(model, refusal)):
            self.surprise(f"{model.name}: {refusal}")

    def surprise(self, text: str) -> None:
        """Record an answer that no act explains."""
        if len(self.surprises) < MOST_SURPRISES:
            self.surprises.append(text[:300])


def explained(model: Model, refusal: Refused) -> bool:
    """The troubles of a model explain the refusal."""
    disturbed = model.troubles & {Trouble.KILLED, Trouble.RELOADED}
    if disturbed and (refusal.code in UNAVAILABLE or GONE.search(refusal.text)):
        return True
    if Trouble.LIMITED in model.troubles and LIMITS.search(refusal.text):
        return True
    if DROPPED in refusal.text:
        return True
    return bool(model.sequences and SEQUENCE.search(refusal.text))
