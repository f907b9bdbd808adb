"""One request in the form of each wire, and the texts of its responses."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from tests.sweep.subjects import Contract, Subject

EMPTY_FINAL = "triton_enable_empty_final_response"
FINAL = "triton_final_response"
DTYPES = {"BYTES": np.object_, "INT32": np.int32, "BOOL": np.bool_}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The texts of the responses, and the error that ended them."""

    texts: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Given:
    """One input."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A request of its own number; a model answers what it was asked, so answers cannot be mixed.

    In a model of sequences it is a request of the sequence of that number, by default all of one.
    """

    subject: Subject
    number: int
    sequence: int = 0
    start: bool = True
    end: bool = True

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.subject.name

    @property
    def text(self) -> str:
        """Its text."""
        number = 0 if self.subject.repeats else self.number
        return f"v{number}{'.' * self.subject.bytes}"

    @property
    def expected(self) -> Outcome:
        """The answer of a model that works."""
        if self.subject.contract is Contract.NUMBERS:
            return Outcome((str(self._numbers),))
        if self.subject.contract is Contract.OPENAI:
            return Outcome((f"{self.text}{self.subject.made}" * self.subject.responses,))
        return Outcome((f"{self.text}{self.subject.made}",) * self.subject.responses)

    @property
    def infer_path(self) -> str:
        """The path of v2 infer."""
        return f"/v2/models/{self.model}/infer"

    @property
    def infer(self) -> bytes:
        """The body of v2 infer."""
        inputs = [
            {"name": g.name, "datatype": g.datatype, "shape": g.shape, "data": g.data}
            for g in self._inputs
        ]
        body: dict[str, Any] = {"inputs": inputs}
        if self._tags:
            body["parameters"] = dict(self._tags)
        return json.dumps(body).encode()

    @property
    def generate(self) -> bytes:
        """The body of generate and generate_stream."""
        body = {g.name: g.data[0] if len(g.data) == 1 else g.data for g in self._inputs}
        tags = self._tags if self.subject.conversation else {}
        return json.dumps({**body, **tags, **self._wish}).encode()

    def openai(self, *, stream: bool) -> bytes:
        """The body of a chat completion."""
        messages = [{"role": "user", "content": self.text}]
        return json.dumps({"model": self.model, "messages": messages, "stream": stream}).encode()

    @property
    def completions(self) -> bytes:
        """The body of a stream of text completions."""
        return json.dumps({"model": self.model, "prompt": self.text, "stream": True}).encode()

    @property
    def message(self) -> Any:
        """The message of gRPC."""
        request = service_pb2.ModelInferRequest(model_name=self.model)
        for given in self._inputs:
            tensor = request.inputs.add(name=given.name, datatype=given.datatype, shape=given.shape)
            if given.datatype == "BYTES":
                tensor.contents.bytes_contents.extend(each.encode() for each in given.data)
            elif given.datatype == "BOOL":
                tensor.contents.bool_contents.extend(given.data)
            else:
                tensor.contents.int_contents.extend(given.data)
        for name, value in {**self._tags, **self._wish}.items():
            kind = "bool_param" if isinstance(value, bool) else "int64_param"
            setattr(request.parameters[name], kind, value)
        return request

    @property
    def fields(self) -> dict[str, Any]:
        """The keywords of a call in process."""
        names = {"sequence_id": "correlation_id"}
        tags = {names.get(name, name): value for name, value in self._tags.items()}
        inputs = {g.name: _array(g) for g in self._inputs}
        return {"inputs": inputs, "parameters": self.subject.sampling, **tags}

    @property
    def _numbers(self) -> list[int]:
        return [self.number] * (1 + self.number % 3)

    @property
    def _tags(self) -> Mapping[str, Any]:
        if not (self.subject.sequence or self.subject.conversation):
            return {}
        number = self.sequence or self.number
        return {"sequence_id": number, "sequence_start": self.start, "sequence_end": self.end}

    @property
    def _wish(self) -> Mapping[str, Any]:
        return {"resumable": True} if self.subject.resumable else self.subject.sampling

    @property
    def _inputs(self) -> Sequence[Given]:
        contract = self.subject.contract
        lead = [1] if self.subject.batches else []
        name = contract.value[0]
        if contract is Contract.NUMBERS:
            return [Given(name, "INT32", [*lead, len(self._numbers)], self._numbers)]
        text = self.text
        if contract is Contract.MESSAGES:
            text = json.dumps([{"role": "user", "content": text}])
        found = [Given(name, "BYTES", [*lead, 1], [text])]
        if contract is Contract.REPEAT:
            found.append(Given("n", "INT32", [1], [self.subject.responses]))
        if self.subject.streams:
            found.append(Given("stream", "BOOL", [1], [True]))
        return found


def from_infer(body: bytes) -> Outcome:
    """The outcome of an answer of v2 infer."""
    found = json.loads(body)
    if "error" in found:
        return Outcome(error=found["error"])
    return Outcome(tuple(_shown(output["data"]) for output in found["outputs"]))


def from_generate(body: bytes) -> Outcome:
    """The outcome of an answer of generate."""
    return _generated([json.loads(body)])


def from_events(body: bytes) -> Outcome:
    """The outcome of the events of generate_stream, or of a refusal before the first."""
    if body.startswith(b"{"):
        return from_generate(body)
    return _generated([json.loads(data) for data in _data(body)])


def from_openai(body: bytes) -> Outcome:
    """The outcome of a chat completion."""
    found = json.loads(body)
    if "error" in found:
        return Outcome(error=str(found["error"]))
    return Outcome((found["choices"][0]["message"]["content"],))


def from_chunks(body: bytes) -> Outcome:
    """The outcome of the chunks of a completion, or of a refusal before the first."""
    if body.startswith(b"{"):
        return from_openai(body)
    chunks = [json.loads(data) for data in _data(body) if data != b"[DONE]"]
    if errors := [str(chunk["error"]) for chunk in chunks if "error" in chunk]:
        return Outcome(error=errors[0])
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [each.get("text") or each.get("delta", {}).get("content", "") for each in choices]
    return Outcome(("".join(deltas),))


def from_message(message: Any) -> Outcome:
    """The outcome of one message of gRPC."""
    texts = []
    for number, output in enumerate(message.outputs):
        if message.raw_output_contents:
            texts.append(_raw(output.datatype, message.raw_output_contents[number]))
        else:
            texts.append(_shown([each.decode() for each in output.contents.bytes_contents]))
    return Outcome(tuple(texts))


def from_response(response: Any) -> Outcome:
    """The outcome of one response in process."""
    return Outcome(tuple(_shown(output.ravel().tolist()) for output in response.outputs.values()))


def _array(given: Given) -> Any:
    return np.array(given.data, dtype=DTYPES[given.datatype]).reshape(given.shape)


def _raw(datatype: str, data: bytes) -> str:
    if datatype == "INT32":
        return str(np.frombuffer(data, np.int32).tolist())
    return data[4:].decode()


def _shown(data: Sequence[Any]) -> str:
    texts = [each.decode() if isinstance(each, bytes) else each for each in data]
    return texts[0] if texts and isinstance(texts[0], str) else str(texts)


def _generated(answers: Iterable[Mapping[str, Any]]) -> Outcome:
    texts, error = [], ""
    for answer in answers:
        error = error or str(answer.get("error", ""))
        texts += [_text(answer[name]) for name in ("text_output", "y") if name in answer]
    return Outcome(tuple(texts), error)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return _shown(value)
    return value if isinstance(value, str) else str([value])


def _data(body: bytes) -> Iterable[bytes]:
    lines = body.splitlines()
    return [line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")]
