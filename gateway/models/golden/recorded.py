"""Golden requests made of clients' requests: JSON and arrays, as they are read from files."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, NoReturn

import numpy as np

from gateway.arrays import to_array
from gateway.config import ModelConfig
from gateway.errors import InferenceError
from gateway.messages import InferRequest
from gateway.models.golden.answer import ExpectedAnswer, GoldenAnswer
from gateway.models.golden.data import PREFIX, Array, GoldenData
from gateway.models.golden.reading import SECS, read_expected, read_request, text_output
from gateway.models.golden.tensor_checks import TOLERANCES, Mismatch
from gateway.openai_contract import Endpoint, serves_openai
from gateway.openai_contract import read_request as read_openai
from gateway.strict_json import StrictObject, parse
from gateway.tensor import Datatype, Tensor

LONG_BYTES = 4096
"""Size above which numbers are in the NPZ file."""
LEAST_PREFIX = 20
"""Characters that texts must have in common at least for the check `prefix`."""
SPREADS = 4.0
"""Tolerances, and the time limit, as multiples of the largest spread and of the longest time."""
MOST_RTOL = 0.5
"""A larger tolerance, relative to the mean, checks nothing."""
SET_BY_SERVER = ("model", "stream", "stream_options")
"""Members of a chat completion that a golden request does not have."""


class NotRecordable(Exception):
    """A request of which no golden request is made; the message is the reason, without its data."""


class GoldenDraft:
    """A golden request in the making: the `members` of its JSON, and its `arrays` by key.

    Raises NotRecordable. `redact` before `request`, then `complete` with the answers. `changed`:
    the client's own answer is no answer to this request.
    """

    def __init__(self, asked: InferRequest, config: ModelConfig) -> None:
        self.changed = False
        self.arrays: dict[str, Array] = {}
        self._config = config
        self._is_chat = serves_openai(config)
        self._output = text_output(config, is_chat=self._is_chat)
        made: dict[str, Any] = {"chat": self._chat(asked)} if self._is_chat else {}
        if not self._is_chat:
            made["inputs"] = self._inputs(asked)
        if asked.parameters:
            made["parameters"] = dict(asked.parameters)
        self.members: dict[str, Any] = {"request": made}

    # The request.

    def texts(self) -> list[str]:
        """The texts in the request, for `redact`."""
        if self.arrays and any(each.dtype.kind == "S" for each in self.arrays.values()):
            raise NotRecordable("has bytes that are no text, which no pattern can redact")
        return list(_texts(self._redactable()))

    def redact(self, texts: Sequence[str]) -> None:
        """Replace the texts, in their order."""
        self.changed = self.changed or self.texts() != texts
        made, source = self.members["request"], iter(texts)
        for name in ("chat", "parameters"):
            if name in made:
                made[name] = _with_texts(made[name], source)
        for each in made.get("inputs", ()):
            if isinstance(each["data"], list):
                each["data"] = _with_texts(each["data"], source)

    def request(self) -> InferRequest:
        """The request as a server reads it."""
        try:
            given = parse(self._json())["request"]
            return read_request(StrictObject(given, "request"), self._config, self._data)
        except (InferenceError, ValueError) as error:
            _refuse(f"cannot be a golden request: {_kind(error)}")

    def digest(self) -> bytes:
        """Equal for equal requests."""
        found = hashlib.sha256(self._json())
        for each in self.arrays.values():
            found.update(np.ascontiguousarray(each).tobytes())
        return found.digest()

    def _redactable(self) -> list[Any]:
        """The members with texts of a client."""
        made = self.members["request"]
        data = [each["data"] for each in made.get("inputs", ()) if isinstance(each["data"], list)]
        return [*(made[name] for name in ("chat", "parameters") if name in made), *data]

    @property
    def _data(self) -> GoldenData:
        return GoldenData("", lambda: self.arrays)

    def _json(self) -> bytes:
        return json.dumps(self.members, ensure_ascii=False, allow_nan=False).encode()

    def _chat(self, asked: InferRequest) -> dict[str, Any]:
        try:
            found = read_openai(asked)
        except InferenceError:
            found = None
        if found is None or found[0] is not Endpoint.CHAT:
            _refuse("no chat completion" if found is None else f"endpoint '{found[0]}'")
        self.changed = bool(found[1].get("stream"))
        return {name: each for name, each in found[1].items() if name not in SET_BY_SERVER}

    def _inputs(self, asked: InferRequest) -> list[dict[str, Any]]:
        return [
            {
                "name": each.name,
                "shape": list(each.shape),
                "datatype": str(each.datatype),
                "data": self._value("in", each),
            }
            for each in asked.inputs
        ]

    def _value(self, kind: str, tensor: Tensor) -> Any:
        """A list of JSON, or the name of an array."""
        if tensor.datatype is Datatype.BYTES:
            elements = [bytes(each) for each in tensor.elements()]
            try:
                return [each.decode() for each in elements]
            except UnicodeDecodeError:
                if any(each.endswith(b"\0") for each in elements):
                    raise NotRecordable("has bytes that end with NUL") from None
            array = np.array(elements, dtype="S").reshape(tensor.shape)
        else:
            array = to_array(tensor)
            if _fits_json(array):
                return array.reshape(-1).tolist()
        key = f"{kind}{len(self.arrays)}"
        self.arrays[key] = array
        return f"{PREFIX}{key}"

    # The expected answer.

    def answer_texts(self, answers: Sequence[GoldenAnswer]) -> list[str]:
        """The texts in the answers, which may have to be redacted."""
        return [*{text: None for each in answers for text in self._answer_texts(each)}]

    def complete(
        self, answers: Sequence[GoldenAnswer], clean: Mapping[str, str], secs: float
    ) -> ExpectedAnswer:
        """Add the checks that all answers pass; `secs` is the longest time of an answer.

        `clean` has the redacted form of each text. Raises NotRecordable if there is no check, and
        names the outputs that differ.
        """
        expect, differing = self._expect(answers, clean)
        if not expect.get("text") and not expect.get("outputs"):
            _refuse("; ".join(differing) or "has no output")
        self.members["expect"] = expect
        if (limit := round(SPREADS * secs, 1)) > SECS:
            self.members["secs"] = limit
        try:
            given = StrictObject(parse(self._json())["expect"], "expect")
            return read_expected(given, self._config, self._data, self._output)
        except (InferenceError, ValueError) as error:
            _refuse(f"cannot be a golden request: {_kind(error)}")

    def _answer_texts(self, answer: GoldenAnswer) -> Iterator[str]:
        if self._is_chat:
            yield _joined(answer, self._output)
            return
        for output in self._config.output:
            if output.datatype is Datatype.BYTES:
                yield _joined(answer, output.name)
                with suppress(NotRecordable):
                    yield from _elements(answer, output.name)

    def _expect(
        self, answers: Sequence[GoldenAnswer], clean: Mapping[str, str]
    ) -> tuple[dict[str, Any], list[str]]:
        expect: dict[str, Any] = {}
        outputs: dict[str, Any] = {}
        differing = []
        names = [self._output] if self._is_chat else [each.name for each in self._config.output]
        for name in names:
            try:
                check = self._check(name, answers, clean)
            except NotRecordable as reason:
                differing.append(f"output '{name}' {reason}")
                continue
            if check and name == self._output and "list" not in check:
                expect["text"] = check
            elif check:
                outputs[name] = {"equals": check["list"]} if "list" in check else check
        if outputs:
            expect["outputs"] = outputs
        with suppress(Mismatch):  # no chat completion has no text either
            reasons = {each.finish_reason(self._output) for each in answers} - {""}
            if reasons:
                expect["finish_reason"] = sorted(reasons)
        return expect, differing

    def _check(
        self, name: str, answers: Sequence[GoldenAnswer], clean: Mapping[str, str]
    ) -> dict[str, Any]:
        """The check of one output; empty if no answer has it."""
        counts = {len(each.outputs(name)) for each in answers}
        if counts == {0}:
            return {}
        found = [each.outputs(name)[0] for each in answers if each.outputs(name)]
        if found[0].datatype is not Datatype.BYTES:
            if max(counts) > 1:
                _refuse("is in several responses")
            return self._number_check(found)
        if not self._is_chat and max(counts) == 1 and max(each.count for each in found) != 1:
            return _list_check([list(_elements(each, name)) for each in answers], clean)
        return _text_check([_joined(each, name) for each in answers if each.outputs(name)], clean)

    def _number_check(self, found: Sequence[Tensor]) -> dict[str, Any]:
        arrays = [to_array(each) for each in found]
        first = arrays[0]
        if any(each.shape != first.shape for each in arrays):
            _refuse("has different shapes")
        defaults = TOLERANCES.get(found[0].datatype)
        if defaults is None:
            if any(not np.array_equal(each, first) for each in arrays):
                _refuse("differs")
            return {"equals": self._value("out", found[0])}
        rtol, atol = tolerances(arrays, *defaults)
        check = {"close": self._value("out", found[0]), "rtol": rtol, "atol": atol}
        return {**check, "nan": True} if np.isnan(first).any() else check


def tolerances(arrays: Sequence[Array], rtol: float, atol: float) -> tuple[float, float]:
    """SPREADS times the largest spread of equal elements, at least the defaults.

    Elements above the mean decide about `rtol`, the others about `atol`: of an element near zero
    any relative spread is large. NotRecordable if a tolerance would check nothing.
    """
    expected = np.asarray(arrays[0], dtype=np.float64)
    high, low, missing = expected, expected, np.isnan(expected)
    for each in arrays[1:]:
        array = np.asarray(each, dtype=np.float64)
        if not np.array_equal(np.isnan(array), missing):
            _refuse("has NaN in some answers")
        high, low = np.fmax(high, array), np.fmin(low, array)
    with np.errstate(all="ignore"):
        spread = np.where((high == low) | missing, 0.0, high - low)
        sizes = np.where(np.isfinite(expected), np.abs(expected), 0.0)
        mean = float(sizes.mean()) if sizes.size else 0.0
        is_large = (sizes >= mean) & (sizes > 0)
        relative = SPREADS * _largest(spread[is_large] / sizes[is_large])
        absolute = SPREADS * _largest(spread[~is_large])
    if not (relative <= MOST_RTOL and absolute <= max(MOST_RTOL * mean, atol)):
        _refuse("differs")
    return max(rtol, float(f"{relative:.3g}")), max(atol, float(f"{absolute:.3g}"))


def _fits_json(array: Array) -> bool:
    """Whether a list of JSON is read as the same values.

    NaN and infinities are no JSON; of numbers below and above 2^63 numpy makes floats.
    """
    if array.nbytes > LONG_BYTES:
        return False
    if array.dtype.kind == "f":
        return bool(np.isfinite(array).all())
    return array.dtype != np.uint64 or not (array >= 1 << 63).any()


def _largest(values: Array) -> float:
    return float(values.max()) if values.size else 0.0


def _text_check(texts: Sequence[str], clean: Mapping[str, str]) -> dict[str, Any]:
    """`equals` for equal texts, else `prefix`; neither repeats what is redacted."""
    usable = {_common(each, clean.get(each, each)) for each in texts}
    if len(usable) == 1 and usable == set(texts):
        return {"equals": texts[0]}
    common = reduce(_common, usable)
    if len(common) < LEAST_PREFIX:
        _refuse("differs" if usable == set(texts) else "has a text to redact")
    return {"prefix": common}


def _common(one: str, other: str) -> str:
    """The longest text that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _list_check(lists: Sequence[list[str]], clean: Mapping[str, str]) -> dict[str, Any]:
    """`list`: the elements, if they are equal in all answers."""
    if any(each != lists[0] for each in lists):
        _refuse("differs")
    if any(clean.get(each, each) != each for each in lists[0]):
        _refuse("has a text to redact")
    return {"list": lists[0]}


def _joined(answer: GoldenAnswer, name: str) -> str:
    try:
        return answer.text(name)
    except Mismatch:
        raise NotRecordable("answered with no chat completion") from None


def _elements(answer: GoldenAnswer, name: str) -> Iterator[str]:
    for tensor in answer.outputs(name):
        for each in tensor.elements():
            try:
                yield bytes(each).decode()
            except UnicodeDecodeError:
                raise NotRecordable("has bytes that are no text") from None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)


def _with_texts(value: Any, texts: Iterator[str]) -> Any:
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, list):
        return [_with_texts(each, texts) for each in value]
    if isinstance(value, dict):
        return {name: _with_texts(each, texts) for name, each in value.items()}
    return value


def _kind(error: Exception) -> str:
    """The start of an error's message, which names members and repeats no value of them."""
    return str(error).partition(":")[0]


def _refuse(reason: str) -> NoReturn:
    raise NotRecordable(reason)
