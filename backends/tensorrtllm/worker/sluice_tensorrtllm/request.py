"""Inputs of a request, as a prompt and arguments of `SamplingParams`, and refusals of them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

MAX_TEXT = 1000
_HOST_PATH = re.compile(
    r"""(?<=["'])(?:file:/)?/[^"'\n]*/[^"'\n]*(?=["'])"""  # in quotes it may have spaces
    r"""|file://[^\s"']*"""
    r"""|(?<![\w:/.])/(?:[\w.@+-]+/)+[\w.@+-]*"""
)
_NAME = re.compile("[A-Za-z0-9_]+")

NOT_SAMPLING = frozenset({"id"})
"""Request parameters of HTTP generate that are no sampling parameters."""


class Refusal(Exception):
    """The text is for clients; `code` is the name of one of Triton's codes."""

    def __init__(self, message: str, code: str = "INVALID_ARG") -> None:
        super().__init__(message)
        self.code = code


def clean(error: BaseException) -> str:
    """The text of a library's exception: its first error, without paths of the host, bounded."""
    text = _HOST_PATH.sub("<path>", _first_mistake(error))
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def _first_mistake(error: BaseException) -> str:
    """pydantic lists all errors with values and links; only the first error is used."""
    mistakes = getattr(error, "errors", None)
    if not callable(mistakes):
        return str(error) or type(error).__name__
    first = mistakes()[0]
    place = ".".join(takewhile(_NAME.fullmatch, map(str, first["loc"])))
    return f"'{place}': {first['msg']}" if place else str(first["msg"])


class Inputs:
    """Reads inputs of any rank, and marks each read one: unread inputs can be refused."""

    def __init__(self, request: Any) -> None:
        self._tensors = {tensor.name(): tensor for tensor in request.inputs()}
        self._unread = set(self._tensors)
        self.parameters = {
            key: value
            for key, value in json.loads(request.parameters() or "{}").items()
            if key not in NOT_SAMPLING
        }

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def values(self, name: str) -> list[Any]:
        """The elements; none if the input is missing."""
        self._unread.discard(name)
        tensor = self._tensors.get(name)
        return [] if tensor is None else tensor.as_numpy().reshape(-1).tolist()

    def texts(self, name: str) -> list[str]:
        """The elements of a BYTES input, but for empty ones."""
        return [text for each in self.values(name) if (text := _decoded(name, each))]

    def one(self, name: str) -> Any:
        """The only element; None if the input is missing."""
        found = self.values(name)
        if name in self and len(found) != 1:
            raise Refusal(f"input '{name}' has {len(found)} elements, expected 1")
        return found[0] if found else None

    def text(self, name: str) -> str | None:
        """The only text; None if the input is missing."""
        found = self.one(name)
        return None if found is None else _decoded(name, found)

    def flag(self, *names: str) -> bool | None:
        """The value of the first of these that was sent."""
        found = [self.one(name) for name in names]
        return next((bool(each) for each in found if each is not None), None)

    def json(self, name: str, kind: type) -> Any:
        """The JSON value of an input; None if the input is missing."""
        text = self.text(name)
        if text is None:
            return None
        try:
            found = json.loads(text)
        except ValueError as error:
            raise Refusal(f"input '{name}' is not valid JSON: {error}") from None
        if not isinstance(found, kind):
            expected = "a list" if kind is list else "an object"
            raise Refusal(f"input '{name}' is JSON, but {expected} is expected in it")
        return found

    def refuse_unread(self) -> None:
        """Refuse inputs that the config declares and that have no meaning here."""
        if self._unread:
            raise Refusal(
                f"input '{sorted(self._unread)[0]}' has no counterpart in TensorRT-LLM's LLM API; "
                "leave it out",
                "UNSUPPORTED",
            )


def _decoded(name: str, value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise Refusal(
            f"input '{name}' is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from None


_SAME = (
    *("max_tokens", "min_tokens", "top_k", "end_id", "pad_id", "temperature", "top_p", "seed"),
    *("length_penalty", "repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_LLM_API = (
    *("best_of", "top_k", "max_tokens", "temperature", "top_p"),
    *("frequency_penalty", "presence_penalty", "seed"),
)
ONE = {
    **{name: name for name in _SAME},
    **{f"sampling_param_{name}": name for name in _LLM_API},
    "min_length": "min_tokens",
    "random_seed": "seed",
    "num_return_sequences": "n",
    "beam_width": "beam_width",
}
"""Inputs with one value, and the sampling parameter that each is."""
LISTS = {"stop_words": "stop", "sampling_param_stop": "stop", "bad_words": "bad"}
INTEGERS = frozenset(
    {"max_tokens", "min_tokens", "top_k", "end_id", "pad_id", "seed", "n", "best_of", "beam_width"}
)
FLOATS = frozenset(
    {
        *("temperature", "top_p", "top_p_min", "top_p_decay", "min_p", "length_penalty"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    }
)
CLOSED = frozenset(
    {
        *("logits_processor", "apply_batched_logits_processor", "embedding_bias"),
        *("lookahead_config", "guided_decoding", "additional_model_outputs"),
        *("return_context_logits", "return_generation_logits", "return_encoder_output"),
        *("prompt_logprobs", "detokenize"),
        # It changes the one tokenizer, which fails while a thread reads another prompt.
        "truncate_prompt_tokens",
    }
)
"""Members that are code or objects, or that change the outputs: clients cannot set them."""
GUIDES = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Triton's types of guides, and the argument of `GuidedDecodingParams` that each is."""
GUIDE_TYPE, GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"


def read_sampling(inputs: Inputs) -> dict[str, Any]:
    """Sampling parameters of inputs, over those of the JSON or of the request's parameters.

    Other names keep the library's meaning: it refuses unknown ones.
    """
    given = inputs.json("sampling_parameters", dict)
    found = _coerced(inputs.parameters if given is None else given)
    for name, meaning in ONE.items():
        if (value := inputs.one(name)) is not None:
            found[meaning] = value
    for name, meaning in LISTS.items():
        if words := inputs.texts(name):
            found[meaning] = words
    for name in (GUIDE_TYPE, GUIDE):
        if (text := inputs.text(name)) is not None:
            found[name] = text
    return _with_beams(found)


def guided(sampling: dict[str, Any]) -> dict[str, Any]:
    """Move the guide out of the sampling: the arguments of `GuidedDecodingParams`, if any."""
    kind, guide = sampling.pop(GUIDE_TYPE, None), sampling.pop(GUIDE, None)
    if kind is None and guide is None:
        return {}
    if kind == "json":
        return {"json_object": True}
    if kind not in GUIDES:
        known = ", ".join(("json", *GUIDES))
        raise Refusal(f"'{GUIDE_TYPE}' is {kind!r}, expected one of {known}")
    if not guide:
        raise Refusal(f"'{GUIDE_TYPE}' is '{kind}', which needs '{GUIDE}'")
    return {GUIDES[kind]: guide}


def end_beside_words(sampling: dict[str, Any]) -> None:
    """Make the end token one of the stop tokens.

    With an `end_id` the library does not tokenise words, and refuses them. A negative one is
    `ignore_eos`.
    """
    if not (sampling.get("stop") or sampling.get("bad")):
        return
    end = sampling.pop("end_id", None)
    if end is not None and end < 0:
        sampling["ignore_eos"] = True
    elif end is not None:
        sampling["stop_token_ids"] = [*(sampling.get("stop_token_ids") or ()), end]


def revises(sampling: Mapping[str, Any]) -> bool:
    """Whether made tokens may not be part of the answer."""
    best = sampling.get("best_of", 0)
    return bool(sampling.get("use_beam_search")) or best > sampling.get("n", 1)


def _coerced(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters under the library's names; numbers may be texts, as Triton's clients send them."""
    found = {}
    for name, value in given.items():
        meaning = ONE.get(name) or LISTS.get(name) or name
        if meaning in CLOSED or meaning.startswith("_"):
            raise Refusal(f"sampling parameter '{name}' cannot be set by clients", "UNSUPPORTED")
        value = _number(meaning, value) if isinstance(value, str) else value
        if value is not None or meaning not in INTEGERS | FLOATS:
            _check_kind(meaning, value)
            found[meaning] = value
    return found


def _check_kind(name: str, value: Any) -> None:
    if name in INTEGERS and type(value) is not int:
        raise Refusal(f"sampling parameter '{name}' is {value!r}, expected a whole number")
    if name in FLOATS and type(value) not in (int, float):
        raise Refusal(f"sampling parameter '{name}' is {value!r}, expected a number")


def _number(name: str, text: str) -> Any:
    try:
        if name in INTEGERS:
            return int(text)
        return float(text) if name in FLOATS else text
    except ValueError:
        raise Refusal(f"sampling parameter '{name}' is {text!r}, expected a number") from None


def _with_beams(sampling: dict[str, Any]) -> dict[str, Any]:
    """Triton's beam width in the library's terms."""
    width = sampling.pop("beam_width", 1)
    if width > 1:
        sampling.update(use_beam_search=True, best_of=width, n=sampling.get("n", width))
    return sampling


FLAGS = {
    "finish_reason": ("return_finish_reason",),
    "stop_reason": ("return_stop_reason",),
    "cumulative_logprob": ("return_cumulative_logprob",),
    "log_probs": ("return_log_probs",),
    "logprobs": ("return_logprobs",),
    "num_input_tokens": ("return_num_input_tokens",),
    "num_output_tokens": ("return_num_output_tokens",),
    "perf_metrics": ("return_perf_metrics", "sampling_param_return_perf_metrics"),
}
"""Optional outputs, and the inputs that ask for each."""


@dataclass(frozen=True)
class LlmRequest:
    """One prompt: a text, token ids, or messages for the chat template, with its variables.

    `sampling` has the library's names, but for the guide and for `lora_name`.
    """

    text: str | None = None
    tokens: list[int] | None = None
    messages: list[Any] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    echo: bool = False
    outputs: frozenset[str] = frozenset()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    lora_number: int | None = None


def read_request(inputs: Inputs) -> LlmRequest:
    """The request in the tensors; Refusal names a wrong one."""
    text, messages = inputs.text("text_input"), inputs.json("messages", list)
    if (text is None) == (messages is None):
        found = "neither" if text is None else "both"
        raise Refusal(f"expected one of the inputs 'text_input' and 'messages', got {found}")
    stream = inputs.flag("stream", "streaming") is True
    exclude = inputs.flag("exclude_input_in_output", "sampling_param_exclude_input_from_output")
    if stream and exclude is False:
        raise Refusal("When streaming, `exclude_input_in_output` = False is not allowed.")
    sampling = read_sampling(inputs)
    if (adapter := inputs.text("lora_name")) is not None:
        sampling["lora_name"] = adapter
    llm_request = LlmRequest(
        text=text,
        messages=messages,
        stream=stream,
        # A chat is repeated only on demand: its text is the template's, not the client's.
        echo=not stream and (text is not None if exclude is None else not exclude),
        outputs=frozenset(name for name, flags in FLAGS.items() if inputs.flag(*flags)),
        sampling=sampling,
        lora_number=inputs.one("lora_task_id"),
    )
    inputs.refuse_unread()
    return llm_request
