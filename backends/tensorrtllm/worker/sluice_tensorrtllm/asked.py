"""What does a client ask for: a prompt, how to sample, and which outputs?"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .inputs import Inputs
from .refusals import Refusal
from .sampling import read_sampling

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
class Asked:
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


def read_asked(inputs: Inputs) -> Asked:
    """What the tensors of a request ask for; Refusal says what is wrong with them."""
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
    asked = Asked(
        text=text,
        messages=messages,
        stream=stream,
        # A conversation is repeated only on demand: its text is the template's, not the client's.
        echo=not stream and (text is not None if exclude is None else not exclude),
        outputs=frozenset(name for name, flags in FLAGS.items() if inputs.flag(*flags)),
        sampling=sampling,
        lora_number=inputs.one("lora_task_id"),
    )
    inputs.refuse_unread()
    return asked
