"""Labels: names of the versions of a model, which clients may ask for in place of numbers."""

import re
from collections.abc import Mapping

from gateway.errors import Code, InferenceError
from gateway.models.model import Model
from gateway.models.model_folder import SHOWN_CHARS
from gateway.models.registry import STABLE, KnownModel, ModelRegistry
from gateway.models.repository import ModelId

LABEL = re.compile(r"[a-z][a-z0-9_-]{0,31}")
CANARY = "canary"
"""The label of the candidate."""
OF_ROLLOUTS = (STABLE, CANARY)
"""The labels that rollouts set."""
MOST_LABELS = 16
"""Labels of one model, those of rollouts not counted."""


def set_labels(known: KnownModel, changes: Mapping[str, int | None]) -> None:
    """Name loaded versions; None removes a label. Raises INVALID_ARG, and nothing changes then."""
    name = known.id.name
    if known.of_fleet:
        raise InferenceError(
            Code.INVALID_ARG, f"model '{name}' has the labels of its replicas; set them there"
        )
    for label, number in changes.items():
        check_label(label, f"model '{name}'")
        if number is not None and number not in known.loaded:
            listed = ", ".join(map(str, sorted(known.loaded))) or "none"
            raise InferenceError(
                Code.INVALID_ARG,
                f"label '{label}' of model '{name}' cannot be version {number}, which is not "
                f"loaded; loaded versions: {listed}",
            )
    wanted = {label: n for label, n in {**known.labels, **changes}.items() if n is not None}
    if sum(label not in OF_ROLLOUTS for label in wanted) > MOST_LABELS:
        raise InferenceError(
            Code.INVALID_ARG, f"model '{name}' may have {MOST_LABELS} labels; remove one first"
        )
    known.labels = wanted


def check_label(label: str, where: str) -> None:
    """Raise INVALID_ARG for a label that only rollouts set, or that is none."""
    if LABEL.fullmatch(label) is None:
        raise InferenceError(
            Code.INVALID_ARG,
            f"{where}: found label {label[:SHOWN_CHARS]!r}, expected 1 to 32 of a-z, 0-9, "
            "'_' and '-', the first of them a letter",
        )
    if label in OF_ROLLOUTS:
        text = f"{where}: label '{label}' is set by rollouts only"
        raise InferenceError(Code.INVALID_ARG, text)


def labels_of(registry: ModelRegistry, model: Model) -> tuple[str, ...]:
    """The labels of a loaded version."""
    known = registry.get(ModelId(model.name, model.namespace))
    labels = {} if known is None else known.labels
    return tuple(label for label, number in labels.items() if str(number) == model.version)
