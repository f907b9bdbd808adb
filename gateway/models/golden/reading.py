"""The golden requests of a model, from the files of its folder `golden/`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from gateway.config import ModelConfig
from gateway.data_files import DataFiles
from gateway.errors import Code, InferenceError
from gateway.generation import TEXT_INPUT, TEXT_OUTPUT
from gateway.messages import InferRequest, Parameter
from gateway.models.golden import tensor_checks, text_checks
from gateway.models.golden.answer import ExpectedAnswer, ExpectedError
from gateway.models.golden.data import MOST_BYTES, GoldenData, read_arrays
from gateway.models.golden.tensor_checks import OutputChecks, read_tensor_checks
from gateway.models.golden.text_checks import TextCheck, read_text_checks
from gateway.models.warmup import check_request
from gateway.openai_contract import (
    RESPONSE,
    Endpoint,
    RequestBody,
    request_tensors,
    serves_openai,
)
from gateway.strict_json import StrictObject, parse, refuse, shown
from gateway.tensor import Datatype, Tensor, format_shape, text_tensor

FOLDER = "golden"
MOST_FILES = 1000
SECS = 10.0
"""Default of `secs`."""
MOST_SECS = 3600.0
CODES: Mapping[str, Code] = {each.name: each for each in Code}


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRequest:
    """A request of the file `NAME.json`, answered within `secs`; `why` is its author's remark."""

    name: str
    request: InferRequest
    expected: ExpectedAnswer
    secs: float
    why: str


def read_golden(config: ModelConfig, folder: Path, version: int) -> list[GoldenRequest]:
    """The golden requests for one version of a completed config, by name; `folder` is the model's.

    Blocks. Raises INVALID_ARG, or INTERNAL for an unreadable file.
    """
    files = DataFiles(config.name, folder, FOLDER, "golden data")
    found = []
    for name in _names(config.name, folder / FOLDER):
        try:
            request = _read(config, files, name, version)
        except InferenceError as error:
            text = f"golden request '{name}': {error.message}"
            raise InferenceError(error.code, text) from None
        if request is not None:
            found.append(request)
    return found


def _names(model: str, folder: Path) -> list[str]:
    """The names of the JSON files, in order; limits count every file."""
    try:
        entries = [each for each in os.scandir(folder) if not each.name.startswith(".")]
        size = sum(each.stat().st_size for each in entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        text = f"'{model}/{FOLDER}' cannot be read: {error.strerror}"
        raise InferenceError(Code.INTERNAL, text) from None
    if len(entries) > MOST_FILES or size > MOST_BYTES:
        refuse(
            f"'{model}/{FOLDER}'",
            f"has {len(entries)} files of {size} bytes, expected at most {MOST_FILES} files of "
            f"{MOST_BYTES} bytes",
        )
    for each in entries:
        if each.is_dir() or not each.name.endswith((".json", ".npz")):
            refuse(f"'{model}/{FOLDER}'", f"has '{each.name}', expected NAME.json and NAME.npz")
    names = [each.name.removesuffix(".json") for each in entries if each.name.endswith(".json")]
    return sorted(names)


def _read(config: ModelConfig, files: DataFiles, name: str, version: int) -> GoldenRequest | None:
    whole = StrictObject(parse(files.read(f"{name}.json", MOST_BYTES)))
    if not _is_for(whole, version):
        return None
    data = GoldenData(name, partial(read_arrays, files, name))
    secs, why = whole.number("secs", SECS, 0.001, MOST_SECS), whole.text("why", "")
    given = whole.object("request")
    output = text_output(config, is_chat="chat" in given)
    request = read_request(given, config, data)
    expected = read_expected(whole.object("expect"), config, data, output)
    whole.end("request", "expect", "versions", "secs", "why")
    return GoldenRequest(name=name, request=request, expected=expected, secs=secs, why=why)


def _is_for(whole: StrictObject, version: int) -> bool:
    versions = whole.take("versions")
    if versions is None:
        return True
    if not isinstance(versions, list) or any(type(each) is not int for each in versions):
        whole.refuse("versions", versions, "a list of version numbers")
    return version in versions


def read_request(given: StrictObject, config: ModelConfig, data: GoldenData) -> InferRequest:
    """The member `request` of a golden request; raises INVALID_ARG."""
    forms = [name for name in ("inputs", "text", "chat") if name in given]
    if len(forms) != 1:
        refuse("request", f"has {' and '.join(forms) or 'none'}, expected inputs, text or chat")
    if forms == ["chat"]:
        inputs = _chat(given.object("chat"), config)
    elif forms == ["text"]:
        inputs = (_text(given, config),)
    else:
        inputs = _inputs(given.take("inputs"), config, data)
    parameters = _parameters(given)
    given.end(forms[0], "parameters")
    made = InferRequest(model=config.name, inputs=inputs, parameters=parameters, uncounted=True)
    try:
        check_request(config, made)
    except InferenceError as error:
        refuse("request", error.message)
    return made


def _chat(chat: StrictObject, config: ModelConfig) -> tuple[Tensor, ...]:
    for name in ("model", "stream"):
        if name in chat:
            refuse(chat.path(name), "is set by the server, expected no such member")
    if not serves_openai(config):
        refuse("request.chat", f"model '{config.name}' does not serve {Endpoint.CHAT}")
    members = {name: chat.take(name) for name in chat.names()}
    body = orjson.dumps({"model": config.name, **members})
    return request_tensors(RequestBody(body), Endpoint.CHAT, config)


def _text(given: StrictObject, config: ModelConfig) -> Tensor:
    text = given.text("text")
    inputs = [each for each in config.input if each.datatype is Datatype.BYTES]
    named = [each for each in inputs if each.name == TEXT_INPUT]
    found = named or [each for each in inputs if not each.optional]
    if len(found) != 1:
        expected = f"expected the input '{TEXT_INPUT}', or one required input of BYTES"
        refuse("request.text", f"model '{config.name}' has no input for it, {expected}")
    shape = (1,) * len(config.wire_shape(found[0]))
    return Tensor(found[0].name, Datatype.BYTES, shape, text_tensor("", [text]).data)


def text_output(config: ModelConfig, *, is_chat: bool) -> str:
    """The output with the text of an answer; "" if there is none."""
    if is_chat:
        return RESPONSE
    names = [each.name for each in config.output if each.datatype is Datatype.BYTES]
    if TEXT_OUTPUT in names:
        return TEXT_OUTPUT
    return names[0] if len(names) == 1 else ""


def _inputs(given: Any, config: ModelConfig, data: GoldenData) -> tuple[Tensor, ...]:
    if not isinstance(given, list):
        refuse("request.inputs", f"is {shown(given)}, expected a list of inputs")
    declared = {each.name: each.datatype for each in config.input}
    return tuple(
        _input(StrictObject(each, f"request.inputs[{number}]"), declared, data)
        for number, each in enumerate(given)
    )


def _input(given: StrictObject, declared: Mapping[str, Datatype], data: GoldenData) -> Tensor:
    name = given.text("name")
    datatype = given.text("datatype", declared.get(name, ""))
    if datatype not in [*Datatype]:
        inputs = "" if name in declared else f": the model's inputs are {', '.join(declared)}"
        given.refuse("datatype", datatype, f"a datatype such as FP32{inputs}")
    path = given.path("data")
    tensor = data.tensor(path, given.take("data"), name, Datatype(datatype))
    shape = given.take("shape", list(tensor.shape))
    if not isinstance(shape, list) or any(type(each) is not int or each < 0 for each in shape):
        given.refuse("shape", shape, "a list of sizes")
    shaped = Tensor(name, tensor.datatype, tuple(shape), tensor.data)
    if shaped.count != tensor.count:
        expected = f"expected {shaped.count} for the shape {format_shape(shape)}"
        refuse(path, f"has {tensor.count} elements, {expected}")
    given.end("name", "shape", "datatype", "data")
    return shaped


def _parameters(given: StrictObject) -> Mapping[str, Parameter]:
    if "parameters" not in given:
        return {}
    members = given.object("parameters")
    found = {name: members.take(name) for name in members.names()}
    for name, value in found.items():
        if not isinstance(value, bool | int | float | str):
            members.refuse(name, value, "a text, a number or a boolean")
    return found


def read_expected(
    given: StrictObject, config: ModelConfig, data: GoldenData, output: str
) -> ExpectedAnswer:
    """The member `expect`; `output` has the text of an answer. Raises INVALID_ARG."""
    if "error" in given:
        error = _error(given.object("error"))
        given.end("error")
        return ExpectedAnswer(tensors={}, texts={}, error=error)
    tensors, texts = _outputs(given, config, data)
    if "text" in given:
        if not output:
            refuse(given.path("text"), f"model '{config.name}' has not exactly one text output")
        texts[output] = [*texts.get(output, ()), *_texts(given.object("text"))]
    reasons = _finish_reasons(given)
    given.end("outputs", "text", "finish_reason", "error")
    if not (tensors or texts or reasons):
        refuse("expect", "has no check, expected outputs, text, finish_reason or error")
    return ExpectedAnswer(tensors=tensors, texts=texts, text_output=output, finish_reasons=reasons)


def _error(given: StrictObject) -> ExpectedError:
    code = given.text("code", "")
    if code and code not in CODES:
        given.refuse("code", code, f"one of {', '.join(CODES)}")
    message = _texts(given.object("text")) if "text" in given else ()
    given.end("code", "text")
    return ExpectedError(code=CODES.get(code), message=message)


def _texts(given: StrictObject) -> list[TextCheck]:
    checks = read_text_checks(given)
    _end(given, text_checks.NAMES, has_any=bool(checks))
    return checks


def _outputs(
    given: StrictObject, config: ModelConfig, data: GoldenData
) -> tuple[dict[str, OutputChecks], dict[str, list[TextCheck]]]:
    tensors: dict[str, OutputChecks] = {}
    texts: dict[str, list[TextCheck]] = {}
    outputs = StrictObject(given.take("outputs", {}), given.path("outputs"))
    datatypes = {each.name: each.datatype for each in config.output}
    for name in outputs.names():
        checks = outputs.object(name)
        if name not in datatypes:
            expected = f"expected one of {', '.join(datatypes)}"
            refuse(outputs.path(name), f"is no output of model '{config.name}', {expected}")
        if of_tensor := read_tensor_checks(checks, name, datatypes[name], data):
            tensors[name] = OutputChecks(datatypes[name], of_tensor)
        is_text = datatypes[name] is Datatype.BYTES
        if is_text and (of_text := read_text_checks(checks)):
            texts[name] = of_text
        names: Sequence[str] = text_checks.NAMES if is_text else tensor_checks.NAMES
        _end(checks, names, has_any=name in tensors or name in texts)
    return tensors, texts


def _end(checks: StrictObject, known: Sequence[str], *, has_any: bool) -> None:
    checks.end(*known)
    if not has_any:
        refuse(checks.whole, f"has no check, expected one of {', '.join(known)}")


def _finish_reasons(given: StrictObject) -> tuple[str, ...]:
    found = given.take("finish_reason", [])
    reasons = [found] if isinstance(found, str) else found
    if not isinstance(reasons, list) or any(not isinstance(each, str) for each in reasons):
        given.refuse("finish_reason", found, "a text, or a list of texts")
    return tuple(reasons)
