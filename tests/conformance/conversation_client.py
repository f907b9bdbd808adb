"""Two turns at once on one stream, the first interrupted: `conversation_client.py URL MODEL`."""

import json
import queue
import sys

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput

answers, client = queue.Queue(), InferenceServerClient(sys.argv[1])
client.start_stream(lambda result, error: answers.put((result, error)))
options = {"sequence_id": "my-chat-81f3", "enable_empty_final_response": True}


def ask(turn, text, **more):
    asked = np.array([json.dumps([{"role": "user", "content": text}])], dtype=object)
    inputs = [InferInput("messages", [1], "BYTES"), InferInput("stream", [1], "BOOL")]
    inputs[0].set_data_from_numpy(asked)
    inputs[1].set_data_from_numpy(np.array([True]))
    client.async_stream_infer(sys.argv[2], inputs, request_id=turn, **options, **more)


ask("first", "count 100000", sequence_start=True)
ask("second", "How far did you count?")  # begins when the first has ended
said = {"first": "", "second": ""}
while said:
    result, error = answers.get(timeout=60)
    if error:
        raise error
    turn, flags = result.get_response().id, result.get_response().parameters
    if (text := result.as_numpy("text_output")) is not None:
        if turn == "first" and not said[turn]:
            stop = {"parameters": {"cancel": True}, "request_id": turn}
            client.async_stream_infer(sys.argv[2], [], **stop)
        said[turn] += text[0].decode()
    if flags["triton_final_response"].bool_param:
        cancelled = " (cancelled)" if "cancelled" in flags else ""
        sys.stdout.write(f"{turn}{cancelled}: {said.pop(turn)}\n")
client.close()
