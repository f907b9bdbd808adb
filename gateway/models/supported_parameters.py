"""Keys of `parameters` that backends honour, ignore or refuse, and the values that they refuse.

The backends read their parameters themselves, and refuse values in the same words; tests compare
these tables with the backends and with their pages.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.errors import InferenceError
from gateway.models import replicas
from gateway.models.limits import RESIDENCE_READERS, residence_problem
from gateway.models.supported_fields import (
    HONOURED,
    PARAMETERS,
    FieldSupport,
    FieldVerdict,
)
from gateway.tensor_runtime.parameters import MOST_THREADS, as_boolean, as_integer, count

Problem = Callable[[str, str, str], str]
"""The objection to a value, "" without one: a function of the key, the value and the model."""


def _accepted(key: str, value: str, model: str) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class ParameterSupport:
    """The verdict on a parameter, and the objection to its value."""

    support: FieldSupport = HONOURED
    problem: Problem = _accepted

    def judge(self, key: str, value: str, model: str) -> FieldSupport:
        """The verdict on a value."""
        found = self.problem(key, value, model)
        return FieldSupport(FieldVerdict.REFUSED, found) if found else self.support


def _checked(problem: Problem, support: FieldSupport = HONOURED) -> ParameterSupport:
    """A parameter whose value may have spaces around it."""
    return ParameterSupport(support, lambda key, value, model: problem(key, value.strip(), model))


def _unused(why: str, problem: Problem = _accepted) -> ParameterSupport:
    return _checked(problem, FieldSupport(FieldVerdict.IGNORED, why))


ANY = ParameterSupport()

# Forests.

FORMATS = ("xgboost", "xgboost_json", "xgboost_ubj", "lightgbm", "treelite_checkpoint")


def _format(key: str, value: str, model: str) -> str:
    if not value or value in FORMATS:
        return ""
    return f"{value} not recognized as a valid serialization format."


def _forest_switch(key: str, value: str, model: str) -> str:
    if value in ("true", "false"):
        return ""
    return f"Expected 'true' or 'false' for parameter '{key}', got: '{value}'"


def _forest_number(key: str, value: str, model: str) -> str:
    try:
        int(value)
    except ValueError:
        return f"Bad input for parameter {key}"
    return ""


def _forest_threshold(key: str, value: str, model: str) -> str:
    try:
        is_number = not math.isnan(float(value))
    except ValueError:
        is_number = False
    return "" if is_number else f"Bad input for parameter {key}"


def _forest_threads(key: str, value: str, model: str) -> str:
    if problem := _forest_number(key, value, model):
        return problem
    if int(value) <= MOST_THREADS:
        return ""
    found = int(value)
    return f"Bad input for parameter {key}: found {found}, expected at most {MOST_THREADS}"


ON_GPUS = "it concerns GPUs; forests are computed on CPUs"
REMOVED = _unused("Triton's backend has removed it in 25.09")
FOREST = {
    "model_type": _checked(_format),
    "is_classifier": _checked(_forest_switch),
    "output_class": _checked(_forest_switch),
    "predict_proba": _checked(_forest_switch),
    "threshold": _checked(_forest_threshold),
    "cpu_nthread": _checked(_forest_threads),
    "xgboost_allow_unknown_field": _unused("XGBoost accepts unknown fields", _forest_switch),
    "layout": _unused(ON_GPUS),
    "chunk_size": _unused(ON_GPUS, _forest_number),
    "transfer_threshold": _unused(ON_GPUS, _forest_number),
    "use_experimental_optimizations": _unused("it is deprecated", _forest_switch),
    "algo": REMOVED,
    "threads_per_tree": REMOVED,
    "storage_type": REMOVED,
    "blocks_per_sm": REMOVED,
}

# OpenVINO.


def _one_of(*allowed: str) -> Problem:
    def problem(key: str, value: str, model: str) -> str:
        return "" if value.upper() in allowed else _unlike(key, "/".join(allowed), value)

    return problem


def _streams(key: str, value: str, model: str) -> str:
    if value.upper() in ("AUTO", "NUMA"):
        return ""
    return _natural(key, value, model, "either AUTO/NUMA/<int_value>")


def _natural(key: str, value: str, model: str, expected: str = "a non-negative number") -> str:
    if not value.isdecimal():
        return _unlike(key, expected, value)
    try:
        count({key: value}, key)
    except InferenceError as error:
        return str(error)
    return ""


def _unlike(key: str, expected: str, value: str) -> str:
    return f"expected the parameter '{key}' to be {expected}, got {value.lower()}"


EVERY_BATCH = _unused("every batch is accepted")
OPENVINO = {
    "TARGET_DEVICE": ANY,
    "NUM_STREAMS": _checked(_streams),
    "INFERENCE_NUM_THREADS": _checked(_natural),
    "COMPILATION_NUM_THREADS": _checked(_natural),
    "PERFORMANCE_HINT": _checked(_one_of("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")),
    "HINT_BF16": _checked(_one_of("YES")),
    "CPU_EXTENSION_PATH": ANY,
    "RESHAPE_IO_LAYERS": ANY,
    "ENABLE_BATCH_PADDING": EVERY_BATCH,
    "SKIP_OV_DYNAMIC_BATCHSIZE": EVERY_BATCH,
}

# TensorFlow.


def _integer(key: str, value: str, accepts: Callable[[int], str]) -> str:
    try:
        return accepts(as_integer(value))
    except ValueError as error:
        return f"parameter '{key}': {error}"


def _session_threads(key: str, value: str, model: str) -> str:
    def accepts(found: int) -> str:
        if found < 0:
            return f"parameter '{key}' must be non-negative number for TensorFlow model '{model}'"
        if found <= MOST_THREADS:
            return ""
        expected = f"expected at most {MOST_THREADS}"
        return f"parameter '{key}' of model '{model}' is {found}, {expected}"

    return _integer(key, value, accepts)


def _share_count(key: str, value: str, model: str) -> str:
    refusal = f"parameter '{key}' must be positive number for TensorFlow model '{model}'"
    return _integer(key, value, lambda found: "" if found > 0 else refusal)


def _session_switch(key: str, value: str, model: str) -> str:
    if value.lower() in ("yes", "no"):
        return ""
    try:
        as_boolean(value)
    except ValueError as error:
        return f"parameter '{key}': {error}"
    return ""


PER_SESSION = "TF_USE_PER_SESSION_THREADS"
TENSORFLOW = {
    "TF_SIGNATURE_DEF": ANY,
    "TF_GRAPH_TAG": ANY,
    "TF_NUM_INTRA_THREADS": _checked(_session_threads),
    "TF_NUM_INTER_THREADS": _checked(_session_threads),
    PER_SESSION: _checked(_session_switch, PARAMETERS[PER_SESSION]),
    "MAX_SESSION_SHARE_COUNT": _checked(_share_count),
    "TF_INIT_OPS_FILE": ANY,
}

# Workers of the Python backend.

MOST_SECS = 1e9


def _limit(key: str, value: str, model: str) -> str:
    try:
        if 0 <= float(value) <= MOST_SECS:
            return ""
    except ValueError:
        """No number."""
    expected = f"expected a number from 0 to {MOST_SECS:g}"
    return f"model '{model}': parameter '{key}' is '{value}', {expected}"


def _forced(key: str, value: str, model: str) -> str:
    return "" if value in ("yes", "no") else f"Incorrect value for {key}: {value}'"


def _no_parser(key: str, value: str, model: str) -> str:
    if not value:
        return ""
    return (
        f"model '{model}': parameter '{key}' is '{value}', expected none: OpenVINO GenAI models "
        "have no parsers; remove it, or use the backend 'vllm'"
    )


LIMITS = (
    "initialize_timeout_secs",
    "execute_timeout_secs",
    "abandoned_execute_secs",
    "worker_memory_limit_mb",
    "health_check_secs",
)
WORKER = {
    **dict.fromkeys(LIMITS, ParameterSupport(problem=_limit)),
    "FORCE_CPU_ONLY_INPUT_TENSORS": ParameterSupport(problem=_forced),
    "EXECUTION_ENV_PATH": ANY,
}
ESTIMATOR = {**WORKER, "trusted_types": ANY}
OPENVINO_GENAI = {
    **WORKER,
    "engine_threads": ANY,
    "tool_call_parser": ParameterSupport(problem=_no_parser),
    "reasoning_parser": ParameterSupport(problem=_no_parser),
}

BACKENDS: Mapping[str, Mapping[str, ParameterSupport]] = {
    "fil": FOREST,
    "openvino": OPENVINO,
    "openvino_genai": OPENVINO_GENAI,
    "sklearn": ESTIMATOR,
    "tensorflow": TENSORFLOW,
}
"""The parameters of backends that read no others."""

IN_ANY_CASE = ("openvino",)
"""Backends whose keys may have any case; those in the table are in capitals."""

OF_ALL_MODELS = (
    "batch_token_budget",
    "continue_tries",
    "conversation_copies",
    "conversation_idle_secs",
    "conversation_max",
    "conversation_max_tokens",
    "conversation_max_turns",
    "fair_output_weight",
    "fair_prompt_weight",
    "max_in_flight",
    "max_model_len",
    "max_padded_length",
    "max_wait_ms",
    "openai_names",
    "padded_inputs",
    "padded_outputs",
    "restart_tries",
    "stored_model",
)
"""Parameters that the gateway reads."""

OF_REPLICAS = dict.fromkeys(replicas.READERS, ParameterSupport(problem=replicas.problem))
"""Parameters of the replicas of any model."""
OF_RESIDENCE = dict.fromkeys(RESIDENCE_READERS, ParameterSupport(problem=residence_problem))
"""Parameters of any model in memory."""
CHECKED = OF_REPLICAS | OF_RESIDENCE


def parameter_support(backend: str, key: str, value: str, model: str) -> FieldSupport:
    """The verdict on a parameter of a model of that backend.

    A key that the backend does not have is ignored, as on Triton. Backends without a table may read
    any key.
    """
    if key in CHECKED:
        return CHECKED[key].judge(key, value, model)
    known = BACKENDS.get(backend)
    if known is None or key in OF_ALL_MODELS:
        return PARAMETERS.get(key, HONOURED)
    found = key.upper() if backend in IN_ANY_CASE else key
    if found not in known:
        return PARAMETERS.get(key) or _unknown(backend, key, known)
    return known[found].judge(found, value, model)


def _unknown(backend: str, key: str, known: Mapping[str, ParameterSupport]) -> FieldSupport:
    import difflib  # 0.2 MiB, for this remark only

    names = {each.lower(): each for each in (*known, *OF_ALL_MODELS, *CHECKED)}
    close = difflib.get_close_matches(key.lower(), names, n=1)
    hint = f"; did you mean '{names[close[0]]}'?" if close else ""
    return FieldSupport(
        FieldVerdict.IGNORED, f"no effect: backend '{backend}' has no such parameter{hint}"
    )
