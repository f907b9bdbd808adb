"""The programs of the Python models that a sweep asks."""

ECHO = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        return [pb.InferenceResponse([self.echo(request)]) for request in requests]

    def echo(self, request):
        given = request.inputs()[0]
        return pb.Tensor({"x": "y"}.get(given.name(), "text_output"), given.as_numpy())
"""
SENDING = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.answer(request.get_response_sender(), request.inputs()[0].as_numpy())

    def answer(self, sender, text):
        for _ in range(3):
            sender.send(pb.InferenceResponse([pb.Tensor("text_output", text)]))
        sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SENDING_LATER = SENDING.replace("import triton", "import threading\nimport triton").replace(
    "self.answer(request.get_response_sender(), request.inputs()[0].as_numpy())",
    "given = request.get_response_sender(), request.inputs()[0].as_numpy()\n"
    "            threading.Thread(target=self.answer, args=given).start()",
)
"""Sends from a thread of its own, after `execute` has returned."""
CALLING = """
import asyncio
import triton_python_backend_utils as pb

class TritonPythonModel:
    async def execute(self, requests):
        return await asyncio.gather(*map(self.answer, requests))

    async def answer(self, request):
        text = pb.Tensor("text_input", request.inputs()[0].as_numpy())
        calls = [
            pb.InferenceRequest(
                model_name="%s", requested_output_names=["text_output"], inputs=[text]
            ).async_exec()
            for _ in range(2)
        ]
        first, _ = await asyncio.gather(*calls)
        if first.has_error():
            return pb.InferenceResponse(error=first.error())
        found = pb.get_output_tensor_by_name(first, "text_output").as_numpy()
        return pb.InferenceResponse([pb.Tensor("text_output", found)])
"""
"""Asks another model twice, side by side."""
ITERATING = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        self.rounds = {}

    def execute(self, requests):
        for request in requests:
            if self.flag(request, "READY"):
                self.answer(request, self.flag(request, "START"))

    def flag(self, request, name):
        return pb.get_input_tensor_by_name(request, name).as_numpy().item()

    def answer(self, request, start):
        key = request.correlation_id()
        self.rounds[key] = 1 if start else self.rounds[key] + 1
        last = self.rounds[key] == 3
        text = pb.get_input_tensor_by_name(request, "text_input").as_numpy()
        flags = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
        answer = pb.InferenceResponse([pb.Tensor("text_output", text)])
        request.get_response_sender().send(answer, flags=flags)
        if not last:
            request.set_release_flags(pb.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
"""
"""Answers in three rounds of an iterative sequence."""
