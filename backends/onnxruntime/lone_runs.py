"""Runs that are alone, and the session that computes them: of all cores, where it is faster."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from threading import Lock
from types import TracebackType
from typing import Any, TypeVar

import numpy.typing as npt

log = logging.getLogger("sluice.onnxruntime")

T = TypeVar("T")
TRIALS = 3
"""Runs of each session before a choice."""
SHORT_NS = 500_000
"""Runs that are as short gain nothing by further threads, and are never tried with them."""
GAIN = 0.9
"""A run with all cores must take at most this part of the time."""
RECENT_RUNS = 8
"""Time constant of the share of runs that began alone and remained so."""
USUALLY = 0.5
"""The least such share for runs with all cores: one that is overtaken slows both down."""
WIDE_RUNS = 1000
OWN_RUNS = 100
"""Lone runs after which the sessions are tried again: other work on the machine changes."""


class ActiveRuns:
    """The runs of the process that compete for its cores; entered for each run, by any thread."""

    def __init__(self) -> None:
        self.count = 0
        self.begun = 0
        self._lock = Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.count += 1
            self.begun += 1

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self.count -= 1


class LoneRuns:
    """The session of all cores that instances of a model share, and its use.

    Sizes of inputs form classes of powers of two. The first lone runs of a class take the
    instance's own session and the session of all cores in turn; later ones take the faster. Once
    a class takes all cores, classes of larger inputs do so without trials before.
    `narrow` is the session that is every instance's own; None if each has another.
    """

    def __init__(self, model: str, narrow: Any, wide: Any, active: ActiveRuns) -> None:
        self.narrow = narrow
        self.wide = wide
        self._model = model
        self._active = active
        self._classes: dict[int, SizeClass] = {}
        self._remain_alone = 1.0

    def compute(self, own: Callable[[], T], wide: Callable[[], T], size: int) -> T:
        """Compute one way or the other; called within `active`. `size`: elements of the inputs."""
        active = self._active
        if active.count > 1:
            return own()
        # No other run is in this part at the same time: it would not be alone.
        known = self.size_class(size)
        is_usual, begun = self._remain_alone >= USUALLY, active.begun
        began_ns = time.perf_counter_ns()
        found = wide() if is_usual and known.is_wide else own()
        spent_ns = time.perf_counter_ns() - began_ns
        remained = active.begun == begun
        self._remain_alone += (remained - self._remain_alone) / RECENT_RUNS
        if is_usual and remained and known.took(spent_ns, max(size, 1)):
            self._log(size, known)
        return found

    def size_class(self, size: int) -> "SizeClass":
        """The class of inputs with that number of elements."""
        bits = size.bit_length()
        known = self._classes.setdefault(bits, SizeClass())
        if not known.is_settled and any(
            each.chosen for smaller, each in self._classes.items() if smaller < bits
        ):
            known.choose(is_wide=True)
        return known

    def _log(self, size: int, known: "SizeClass") -> None:
        log.info(
            "session of lone runs chosen",
            extra={"model": self._model, "elements": size, "all_cores": known.is_wide},
        )


class SessionPair:
    """A session that computes with one of two: the instance's own, or that of all cores."""

    def __init__(self, own: Any, lone: LoneRuns) -> None:
        self._own = own
        self._lone = lone
        self.get_inputs = own.get_inputs
        self.get_outputs = own.get_outputs
        self.get_overridable_initializers = own.get_overridable_initializers

    def run(self, names: list[str], feeds: Mapping[str, npt.NDArray[Any]], options: Any) -> Any:
        """As `InferenceSession.run`."""
        size = sum(each.size for each in feeds.values())
        return self._compute("run", size, names, feeds, options)

    def run_with_ort_values(self, names: list[str], feeds: Mapping[str, Any], options: Any) -> Any:
        """As `InferenceSession.run_with_ort_values`."""
        size = sum(math.prod(each.shape()) for each in feeds.values())
        return self._compute("run_with_ort_values", size, names, feeds, options)

    def _compute(self, method: str, size: int, *arguments: Any) -> Any:
        own, wide = (
            partial(getattr(each, method), *arguments) for each in (self._own, self._lone.wide)
        )
        return self._lone.compute(own, wide, size)


@dataclass(slots=True)
class SizeClass:
    """The choice for inputs of about one size, from the fastest trials of each session."""

    is_settled: bool = False
    """Whether a choice has been made."""
    chosen: bool = False
    runs_left: int = 0
    trials: int = 0
    own_ns: float = math.inf
    wide_ns: float = math.inf

    @property
    def is_wide(self) -> bool:
        """Whether the next lone run takes all cores."""
        return self.chosen if self.runs_left else self.trials % 2 == 1

    def took(self, spent_ns: int, size: int) -> bool:
        """Record the time of the run that `is_wide` was asked for; whether the choice changes."""
        if self.runs_left:
            self.runs_left -= 1
            return False
        if self.trials % 2 == 1:
            self.wide_ns = min(self.wide_ns, spent_ns / size)
        elif spent_ns <= SHORT_NS:
            return self.choose(is_wide=False)
        else:
            self.own_ns = min(self.own_ns, spent_ns / size)
        self.trials += 1
        if self.trials < 2 * TRIALS:
            return False
        return self.choose(is_wide=self.wide_ns <= GAIN * self.own_ns)

    def choose(self, *, is_wide: bool) -> bool:
        """Keep to one of the sessions for a number of runs; whether the choice changes."""
        changes, self.is_settled = self.chosen != is_wide, True
        self.chosen, self.trials = is_wide, 0
        self.runs_left = WIDE_RUNS if is_wide else OWN_RUNS
        self.own_ns = self.wide_ns = math.inf
        return changes
