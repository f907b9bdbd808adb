"""Chats by instruction: the last message of a conversation says what to do."""

import itertools
import json
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

PAUSE_SECS = 0.02
HELD = "tell a story, with a pause until there is "
MARKDOWN = """# A heading

Some **bold** words, *slanted* ones and `code`, but 2 * 3 * 4 and <b>no markup</b>.

- first
- second

1. one
2. two

```python
print("<script>alert(1)</script>")
```
The end."""
TALE = "Once upon a time a sluice let the water through, drop by drop, and none had to wait."


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            messages = read(request)
            asked = messages[-1]["content"]
            try:
                for piece in pieces(request, asked, messages):
                    if sender.is_cancelled():
                        pb_utils.Logger.log_info(f"no more of '{asked}'")
                        break
                    sender.send(response(piece))
            except ValueError as error:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def response(text):
    value = np.array([text.encode()], dtype=np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", value)])


def read(request):
    given = pb_utils.get_input_tensor_by_name(request, "messages").as_numpy()
    return json.loads(given.ravel()[0])


def pieces(request, asked, messages):
    """The answer, piece by piece; "fail" and "break off" raise."""
    if asked == "history":
        yield " | ".join(f"{each['role']}: {each['content']}" for each in messages)
    elif asked == "parameters":
        yield request.parameters()
    elif asked == "markdown":
        yield from (MARKDOWN[at : at + 7] for at in range(0, len(MARKDOWN), 7))
    elif asked.startswith("endless"):
        yield from paced(f"word {number} " for number in itertools.count())
    elif asked.startswith(HELD):
        yield from held(Path(asked.removeprefix(HELD)), request.get_response_sender())
    elif asked == "say nothing":
        while not request.get_response_sender().is_cancelled():
            time.sleep(PAUSE_SECS)
    elif asked == "fail":
        raise ValueError("the story is lost")
    elif asked == "break off":
        yield "Once upon"
        raise ValueError("the page is torn")
    else:
        yield from paced(f"{word} " for word in TALE.split())


def held(file, sender):
    """The tale; its second half comes when the file is there."""
    words = [f"{word} " for word in TALE.split()]
    half = len(words) // 2
    yield from words[:half]
    while not file.exists() and not sender.is_cancelled():
        time.sleep(PAUSE_SECS)
    yield from paced(words[half:])


def paced(words):
    for word in words:
        yield word
        time.sleep(PAUSE_SECS)
