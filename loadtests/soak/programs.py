"""The `model.py` of each Python model that the soak serves."""

HEAD = """import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def given(request):
    return pb_utils.get_input_tensor_by_name(request, "x").as_numpy()


def response(y):
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])


class TritonPythonModel:
    def initialize(self, args):
        with open("/proc/self/comm", "w") as name:
            name.write(args["model_name"])
"""
ECHO = f"""{HEAD}
    def execute(self, requests):
        return [response(given(request)) for request in requests]
"""
SLOW_ECHO = f"""{HEAD}
    def execute(self, requests):
        time.sleep(0.0004)
        return [response(given(request)) for request in requests]
"""
STREAM = f"""{HEAD}
    def execute(self, requests):
        for request in requests:
            work = request.get_response_sender(), given(request), request
            threading.Thread(target=self.send, args=work).start()

    def send(self, sender, x, request):
        for _ in range(5):
            time.sleep(0.001)
            sender.send(response(x))
        sender.send(flags=FINAL)
"""
LARGE = f"""{HEAD}
    def execute(self, requests):
        for request in requests:
            work = request.get_response_sender(), given(request), request
            threading.Thread(target=self.send, args=work).start()

    def send(self, sender, x, request):
        y = np.full(20000, x[0], np.float32)
        for _ in range(30):
            if request.is_cancelled():
                break
            sender.send(response(y))
        sender.send(flags=FINAL)
"""
TWICE = f"""{HEAD}
    def execute(self, requests):
        for request in requests:
            start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy()
            if start.any():
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                request.get_response_sender().send(response(given(request)), flags=FINAL)
"""
BUSINESS = f"""import asyncio

{HEAD}
    async def execute(self, requests):
        return list(await asyncio.gather(*map(self.answer, requests)))

    async def answer(self, request):
        x = given(request)
        asked = [
            pb_utils.InferenceRequest(
                model_name=name,
                requested_output_names=["y"],
                inputs=[pb_utils.Tensor("x", x.reshape(shape))],
            )
            for name, shape in (("dynamic", (1, 1)), ("py_direct", (1,)))
        ]
        for found in await asyncio.gather(*(each.async_exec() for each in asked)):
            if found.has_error():
                return pb_utils.InferenceResponse(error=found.error())
            x = pb_utils.get_output_tensor_by_name(found, "y").as_numpy().reshape(1)
        return response(x)
"""
EMBED = f"""{HEAD}
    def execute(self, requests):
        return [self.embed(request) for request in requests]

    def embed(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy().ravel()
        numbers = [float(text.split()[1]) for text in texts]
        found = np.array([[number, number] for number in numbers], np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("embedding", found)])
"""
TALK = """import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        with open("/proc/self/comm", "w") as name:
            name.write(args["model_name"])

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            messages = pb_utils.get_input_tensor_by_name(request, "messages").as_numpy()
            for word in json.loads(messages.ravel()[0])[-1]["content"].split():
                if request.is_cancelled():
                    break
                time.sleep(0.001)
                text = np.array([f"{word} ".encode()], dtype=np.object_)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]))
            sender.send(flags=FINAL)
"""
