"""Runs the code that it is sent, as the body of a function of `self` and `requests`."""

from probing import written


class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        self.kept = []

    async def execute(self, requests):
        return await written(requests, "async def")(self, requests)
