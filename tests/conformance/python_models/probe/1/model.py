"""Runs the code that it is sent, as the body of a function of `self` and `requests`."""

from probing import written


class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        self.kept = []

    def execute(self, requests):
        return written(requests)(self, requests)
