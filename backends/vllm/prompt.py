"""How does a text, a conversation or an image become what the engine takes as its prompt?"""

import asyncio
import binascii
from base64 import b64decode
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from PIL import Image, UnidentifiedImageError
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.inputs.preprocess import parse_model_prompt

from backends.vllm.validation import first_mistake
from gateway.generation import IMAGE, MESSAGES, TEXT_INPUT, GenerationRequest, invalid


class PromptRenderer:
    """Renders prompts with vLLM's own renderer; templates and tokenizer run in its threads.

    `chat` is the renderer of vLLM's handlers: whoever asks, a conversation has one template.
    """

    def __init__(self, engine: Any, chat: Any) -> None:
        self._model_config = engine.model_config
        self._renderer = engine.renderer
        self._chat = chat

    async def render(self, request: GenerationRequest) -> Any:
        """The engine's input for a request; raises InferenceError, or what vLLM raises."""
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
            # So vLLM refuses an image that lies in a file of this host.
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
