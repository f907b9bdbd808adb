"""A model that answers with the function named by the first word of the latest question."""

import json
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

PAUSE_SECS = 0.005
DOCUMENT = (
    "# Title\n\nSome **bold** words\nin two lines.\n\n- one\n- two\n\n```\ncode <b>\n```\n\nEnd."
)


class TritonPythonModel:
    def initialize(self, args):
        self.folder = Path(args["model_repository"])

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                answer(self, request, sender)
            except Refusal as error:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class Refusal(Exception):
    """The answer is an error."""


def answer(model, request, sender):
    messages = json.loads(text(request, "messages"))
    name, _, rest = messages[-1]["content"].partition(" ")
    for word in FUNCTIONS[name](model, request, rest):
        if sender.is_cancelled():
            (model.folder / "stopped").write_text(messages[-1]["content"])
            return
        if word is not None:
            send(sender, word)
    send(sender, "", tokens=0, reason="length" if name == "cut" else "stop")


def send(sender, word, tokens=1, reason="None"):
    outputs = [
        pb_utils.Tensor("text_output", np.array([word.encode()], dtype=object)),
        pb_utils.Tensor("num_output_tokens", np.array([tokens], dtype=np.uint32)),
        pb_utils.Tensor("finish_reason", np.array([reason.encode()], dtype=object)),
    ]
    sender.send(pb_utils.InferenceResponse(outputs))


def text(request, name):
    found = pb_utils.get_input_tensor_by_name(request, name)
    return None if found is None else found.as_numpy()[0].decode()


def count(model, request, rest):
    yield from (f"word{number} " for number in range(int(rest)))


def cut(model, request, rest):
    yield "This is cut"


def forever(model, request, rest):
    number = 0
    while True:
        yield f"word{number} "
        number += 1
        time.sleep(PAUSE_SECS)


def silent(model, request, rest):
    while True:
        yield None
        time.sleep(PAUSE_SECS)


def recall(model, request, rest):
    yield text(request, "messages")


def sampling(model, request, rest):
    yield text(request, "sampling_parameters") or "nothing"


def document(model, request, rest):
    yield from DOCUMENT.replace(" ", " |").split("|")


def steer(model, request, rest):
    yield "before\x1b]0;stolen\x07\x1b[31mafter <think>aloud</think>"


def nothing(model, request, rest):
    return ()


def refuse(model, request, rest):
    raise Refusal("the model says no")


def refuse_late(model, request, rest):
    yield "so far so good"
    raise Refusal("the model gives up")


def no_template(model, request, rest):
    raise Refusal("so you must provide a chat template if the tokenizer does not define one")


FUNCTIONS = {
    "count": count,
    "cut": cut,
    "forever": forever,
    "silent": silent,
    "recall": recall,
    "sampling": sampling,
    "document": document,
    "steer": steer,
    "nothing": nothing,
    "refuse": refuse,
    "refuse-late": refuse_late,
    "no-template": no_template,
}
