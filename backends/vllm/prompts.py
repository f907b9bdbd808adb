"""Prompts of requests, rendered by vLLM: short ones in place, others in its threads."""

import asyncio
import binascii
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from io import BytesIO
from typing import Any

from PIL import Image, UnidentifiedImageError
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.hf import HfRenderer, safe_apply_chat_template
from vllm.renderers.inputs.preprocess import parse_model_prompt

from backends.vllm.failures import first_mistake
from gateway.generation import IMAGE, MESSAGES, TEXT_INPUT, GenerationRequest, invalid

SHORT_CHARS = 512
SHORT_MESSAGES = 16
"""A fast tokenizer needs less than a millisecond for that many, and a template a tenth of it."""
PLAIN = frozenset({"role", "content"})
"""The members of a message whose length is that of its text."""


def render_short_in_place(renderer: Any, template: str | None) -> None:
    """Have vLLM's renderer tokenize short prompts, and fill in short conversations, in place.

    Its threads cost more: a wake-up and twice the interpreter lock, 0.7 ms for a short conversation
    that is ready after 0.1 ms. Only the model's own template, `template` or that of its tokenizer,
    is known to be quick. What has a tokenizer in Python stays in the threads, as all of a renderer
    with other names than that of vLLM 0.32.
    """
    if not getattr(getattr(renderer, "tokenizer", None), "is_fast", False):
        return
    if hasattr(renderer, "_tokenize_prompt_async"):
        renderer._tokenize_prompt_async = _in_place_if(  # noqa: SLF001 - the documented seam
            lambda prompt, *_: len(prompt["prompt"]) <= SHORT_CHARS,
            renderer._tokenize_prompt,  # noqa: SLF001
            renderer._tokenize_prompt_async,  # noqa: SLF001
        )
    if isinstance(renderer, HfRenderer) and hasattr(renderer, "_apply_chat_template_async"):
        renderer._apply_chat_template_async = _in_place_if(  # noqa: SLF001
            lambda _, __, conversation, **options: (
                _is_short(conversation) and _is_quick(options, template)
            ),
            safe_apply_chat_template,
            renderer._apply_chat_template_async,  # noqa: SLF001
        )


def _in_place_if(
    is_short: Callable[..., bool], render: Callable[..., Any], in_thread: Callable[..., Any]
) -> Callable[..., Awaitable[Any]]:
    """The function `in_thread`, with calls of `render` in its place where `is_short` holds."""

    def rendered(*arguments: Any, **options: Any) -> Awaitable[Any]:
        if not is_short(*arguments, **options):
            awaitable: Awaitable[Any] = in_thread(*arguments, **options)
            return awaitable
        found = asyncio.get_running_loop().create_future()
        try:
            found.set_result(render(*arguments, **options))
        except Exception as error:  # noqa: BLE001 - raised where the future is awaited
            found.set_exception(error)
        return found

    return rendered


def _is_short(conversation: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation has few short messages of text."""
    if len(conversation) > SHORT_MESSAGES:
        return False
    texts = [message.get("content") for message in conversation if message.keys() <= PLAIN]
    return (
        len(texts) == len(conversation)
        and all(isinstance(text, str) for text in texts)
        and sum(map(len, texts)) <= SHORT_CHARS  # type: ignore[arg-type]
    )


def _is_quick(options: Mapping[str, Any], template: str | None) -> bool:
    """Whether the options of a template are those of a request without structures of its own."""
    return options.get("chat_template") == template and all(
        value is None
        or isinstance(value, bool)
        or (isinstance(value, str) and len(value) <= SHORT_CHARS)
        for name, value in options.items()
        if name != "chat_template"
    )


class PromptRenderer:
    """Renders prompts with vLLM's renderer.

    `chat` is the renderer of vLLM's handlers, so both APIs use the same chat template.
    """

    def __init__(self, engine: Any, chat: Any) -> None:
        self._model_config = engine.model_config
        self._renderer = engine.renderer
        self._chat = chat

    async def render(self, request: GenerationRequest) -> Any:
        """The engine's input for a request; raises InferenceError, or an error of vLLM."""
        if request.messages is not None:
            return await self._render_messages(request)
        prompt: Any = request.text
        if request.images:
            images = await asyncio.to_thread(_decode_images, request.images)
            prompt = {"prompt": request.text, "multi_modal_data": {"image": images}}
        return await self.render_prompt(prompt)

    async def render_prompt(self, prompt: Any) -> Any:
        """The engine's input for a text, a dict with images, or a list of token ids."""
        parsed = parse_model_prompt(self._model_config, prompt)
        parameters = self._renderer.default_cmpl_tok_params
        (rendered,) = await self._renderer.render_cmpl_async([parsed], parameters)
        return rendered

    async def _render_messages(self, request: GenerationRequest) -> Any:
        if request.images:
            raise invalid(
                f"the input '{IMAGE}' goes with '{TEXT_INPUT}'; in '{MESSAGES}' an "
                "image is a part of a message"
            )
        try:
            conversation = ChatCompletionRequest(messages=request.messages)
        except ValidationError as error:
            raise invalid(
                f"the input '{MESSAGES}' is no conversation: {first_mistake(error)}"
            ) from None
        try:
            rendered = await self._chat.render_chat(conversation)
        except RuntimeError as error:
            # vLLM refuses an image in a file of this host with this error.
            raise invalid(str(error)) from error
        if not isinstance(rendered, tuple):
            raise invalid(rendered.error.message)
        (prompt,) = rendered[1]
        return prompt


def _decode_images(encoded: Sequence[bytes]) -> list[Image.Image]:
    return [_decode_image(number, text) for number, text in enumerate(encoded)]


def _decode_image(number: int, text: bytes) -> Image.Image:
    try:
        with Image.open(BytesIO(b64decode(text, validate=True))) as image:
            return image.convert("RGB")
    except binascii.Error as error:
        raise invalid(f"element {number} of the input '{IMAGE}' is not base64: {error}") from None
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError) as error:
        reason = (
            "no image of a known format" if isinstance(error, UnidentifiedImageError) else error
        )
        raise invalid(f"element {number} of the input '{IMAGE}': {reason}") from None
