"""Prompts of requests, rendered by vLLM: short ones in place, others in its threads."""

import asyncio
import binascii
from base64 import b64decode
from collections.abc import Awaitable, Mapping, Sequence
from io import BytesIO
from typing import Any

from PIL import Image, UnidentifiedImageError
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.hf import HfRenderer, safe_apply_chat_template
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin

from backends.vllm.failures import first_mistake
from gateway.generation import IMAGE, MESSAGES, TEXT_INPUT, GenerationRequest, invalid

SHORT_CHARS = 512
SHORT_MESSAGES = 16
"""A fast tokenizer needs less than a millisecond for that many, and a template a tenth of it."""
TURN_CHARS = 4096
"""Characters that are rendered in place in one turn of the event loop; further ones in threads."""
FEW_OPTIONS = 16


def render_short_in_place(renderer: Any, template: str | None) -> None:
    """Have vLLM's renderer tokenize short prompts, and fill in short conversations, in place.

    And have it look up its tokenizer's end of text once, not for each request. No effect on a
    renderer that does so already.

    Its threads cost more: a wake-up and twice the interpreter lock, 0.7 ms for a short conversation
    that is ready after 0.1 ms. Only the model's own template, `template` or that of its tokenizer,
    is known to be quick. Tokenizers in Python, and those that a thread and the event loop must not
    use at the same time, stay in the threads.
    """
    known = getattr(renderer, "_tokenize_prompt_async", None)
    if isinstance(getattr(known, "__self__", None), ShortPrompts):
        return
    tokenizer = getattr(renderer, "tokenizer", None)
    if isinstance(tokenizer, ThreadSafeHFTokenizerMixin) and getattr(tokenizer, "is_fast", False):
        ShortPrompts(renderer, template)


class ShortPrompts:
    """Stands in front of the functions of a renderer that render in threads."""

    def __init__(self, renderer: Any, template: str | None) -> None:
        self._template = template
        self._left = TURN_CHARS
        end_of_text = renderer.get_eos_token_id()  # looks it up among all tokens each time
        renderer.get_eos_token_id = lambda: end_of_text
        self._tokenize = renderer._tokenize_prompt  # noqa: SLF001 - the documented seam
        self._tokenize_in_thread = renderer._tokenize_prompt_async  # noqa: SLF001
        renderer._tokenize_prompt_async = self.tokenize  # noqa: SLF001
        if isinstance(renderer, HfRenderer):
            self._apply_in_thread = renderer._apply_chat_template_async  # noqa: SLF001
            self._with_timeout = renderer._render_with_timeout  # noqa: SLF001
            renderer._apply_chat_template_async = self.apply_template  # noqa: SLF001
            renderer._render_with_timeout = self.with_timeout  # noqa: SLF001

    def tokenize(self, prompt: Mapping[str, Any], parameters: Any) -> Awaitable[Any]:
        """As `BaseRenderer._tokenize_prompt_async`; raises the error of a short prompt at once."""
        awaitable: Awaitable[Any]
        if self._may_take(len(prompt["prompt"])):
            awaitable = _ready(self._tokenize(prompt, parameters))
        else:
            awaitable = self._tokenize_in_thread(prompt, parameters)
        return awaitable

    def apply_template(
        self,
        model_config: Any,
        tokenizer: Any,
        conversation: Sequence[Mapping[str, Any]],
        **options: Any,
    ) -> Awaitable[Any]:
        """As `HfRenderer._apply_chat_template_async`; raises as `tokenize`."""
        awaitable: Awaitable[Any]
        arguments = (model_config, tokenizer, conversation)
        if _is_quick(options, self._template) and self._may_take(_length(conversation)):
            awaitable = _ready(safe_apply_chat_template(*arguments, **options))
        else:
            awaitable = self._apply_in_thread(*arguments, **options)
        return awaitable

    async def with_timeout(self, rendering: Awaitable[Any]) -> Any:
        """As `HfRenderer._render_with_timeout`, without a timer for what is ready."""
        if isinstance(rendering, asyncio.Future) and rendering.done():
            return rendering.result()
        return await self._with_timeout(rendering)

    def _may_take(self, chars: int) -> bool:
        if chars > min(SHORT_CHARS, self._left):
            return False
        if self._left == TURN_CHARS:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._left -= max(1, chars)
        return True

    def _next_turn(self) -> None:
        self._left = TURN_CHARS


def _ready(result: Any) -> asyncio.Future[Any]:
    found = asyncio.get_running_loop().create_future()
    found.set_result(result)
    return found


def _length(conversation: Sequence[Mapping[str, Any]]) -> int:
    """The characters of a conversation with few messages of text; of others more than is short."""
    if len(conversation) > SHORT_MESSAGES:
        return SHORT_CHARS + 1
    texts = [text for message in conversation for text in message.values()]
    return sum([len(text) if isinstance(text, str) else SHORT_CHARS + 1 for text in texts])


def _is_quick(options: Mapping[str, Any], template: str | None) -> bool:
    """Whether the options of a template are few, short and without structures."""
    return (
        len(options) <= FEW_OPTIONS
        and options.get("chat_template") == template
        and not options.get("tokenize")
        and all(
            value is None
            or isinstance(value, bool)
            or (isinstance(value, str) and len(value) <= SHORT_CHARS)
            for name, value in options.items()
            if name != "chat_template"
        )
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
