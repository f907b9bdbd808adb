"""Says the last words of a conversation again, word by word: put your own model into `_words`."""

import json
import time
import uuid

import numpy as np
import triton_python_backend_utils as pb_utils

INVALID = pb_utils.TritonError.INVALID_ARG
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Answers the bodies of OpenAI's `chat/completions` and `completions`."""

    def execute(self, requests):
        """Send every answer through the request's sender, as many as it takes."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                for answer in _answers(_text(request, "openai_endpoint"), _body(request)):
                    if request.is_cancelled():  # every client has disconnected
                        break
                    sender.send(_response(answer))
            except ValueError as error:
                # INVALID_ARG is a 400 in OpenAI's JSON; an error without a code is a 500.
                refusal = pb_utils.TritonError(str(error), INVALID)
                sender.send(pb_utils.InferenceResponse(error=refusal))
            sender.send(flags=FINAL)


def _answers(endpoint, body):
    """The whole answer, or if the client wants a stream its chunks; each is one JSON object."""
    chat = endpoint != "completions"
    prompt = _prompt(endpoint, body)
    words = _words(prompt)
    counts = len(prompt.split()), len(words)
    usage = dict(zip(("prompt_tokens", "completion_tokens"), counts, strict=True))
    usage["total_tokens"] = sum(counts)
    if not body.get("stream"):
        message = {"role": "assistant", "content": "".join(words)}
        yield _object(body, chat, "", _choice(chat, "message", message, "stop"), usage=usage)
        return
    deltas = [{"role": "assistant", "content": ""}] if chat else []
    for delta in (*deltas, *({"content": word} for word in words)):
        yield _object(body, chat, ".chunk", _choice(chat, "delta", delta, None))
    yield _object(body, chat, ".chunk", _choice(chat, "delta", {}, "stop"))
    # Only a request for usage gets a chunk without a choice: other clients read a choice in each.
    if (body.get("stream_options") or {}).get("include_usage"):
        yield _object(body, chat, ".chunk", [], usage=usage)


def _prompt(endpoint, body):
    """The text to answer; ValueError says what is wrong with the request."""
    if endpoint == "completions":
        found = body.get("prompt")
    elif endpoint in (None, "chat/completions"):
        messages = body.get("messages")
        last = messages[-1] if isinstance(messages, list) and messages else None
        found = last.get("content") if isinstance(last, dict) else None
    else:
        raise ValueError(f"{endpoint} is not served by this model")
    if not isinstance(found, str):
        raise ValueError("the request has no text: expected `prompt`, or `messages` with `content`")
    return found


def _words(prompt):
    """The answer, piece by piece."""
    return [f"{word} " for word in prompt.split()]


def _choice(chat, name, content, reason):
    shown = {name: content} if chat else {"text": content.get("content", "")}
    return [{"index": 0, **shown, "logprobs": None, "finish_reason": reason}]


def _object(body, chat, suffix, choices, **more):
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{body['id']}",
        "object": f"chat.completion{suffix}" if chat else "text_completion",
        "created": int(time.time()),
        "model": body.get("model") or "openai_python",
        "choices": choices,
        **more,
    }


def _body(request):
    """The JSON of the request, with an id: one for all chunks of an answer."""
    return json.loads(_text(request, "openai_request")) | {"id": uuid.uuid4().hex}


def _text(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()[0].decode()


def _response(answer):
    text = np.array([json.dumps(answer).encode()], dtype=np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor("openai_response", text)])
