"""Metric families of a model, and the lengths of its prompts and answers."""

from typing import Any

import triton_python_backend_utils as pb_utils

BUCKETS = [10.0, 50.0, 100.0, 500.0, 1000.0]


class MetricFamilies:
    """Families of the metrics of one model, which live as long as this object."""

    def __init__(self, model: str, version: str) -> None:
        self.labels = {"model": model, "version": version}
        self._families: list[Any] = []

    def family(self, name: str, about: str, kind: Any) -> Any:
        """A new family."""
        family = pb_utils.MetricFamily(name=name, description=about, kind=kind)
        self._families.append(family)
        return family

    def gauge(self, family: Any, label: str, value: str) -> Any:
        """The series of that family with the value of one more label."""
        return family.Metric(labels={**self.labels, label: value})


class TokenLengths:
    """The histograms of the lengths of prompts and answers."""

    def __init__(self, metrics: MetricFamilies) -> None:
        self._kept = metrics
        self._prompts = _lengths(metrics, "nv_llm_input_token_len", "total_input_tokens")
        self._answers = _lengths(metrics, "nv_llm_output_token_len", "total_output_tokens")

    def finished(self, prompt_tokens: int, tokens: int) -> None:
        """Count the tokens of an answered request."""
        self._prompts.observe(prompt_tokens)
        self._answers.observe(tokens)


def _lengths(metrics: MetricFamilies, name: str, kind: str) -> Any:
    family = metrics.family(name, "Tokens of a request", pb_utils.MetricFamily.HISTOGRAM)
    labels = {**metrics.labels, "response_metric_type": kind}
    return family.Metric(labels=labels, buckets=BUCKETS)
