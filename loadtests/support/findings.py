"""Figures with bounds: what a load test found, and whether its bound holds."""

from dataclasses import dataclass

from loadtests.support.results import number


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A value that is at least `least` and at most `most`; None for no bound."""

    figure: str
    value: float
    unit: str = ""
    least: float | None = None
    most: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the value is within its bounds."""
        low, high = self.least, self.most
        return (low is None or self.value >= low) and (high is None or self.value <= high)

    @property
    def shown(self) -> str:
        """The value with its unit."""
        return f"{number(self.value)} {self.unit}".rstrip()

    @property
    def bound(self) -> str:
        """The bounds in words; "" for none."""
        words = ("at least", self.least), ("at most", self.most)
        return ", ".join(f"{word} {number(each)}" for word, each in words if each is not None)

    @property
    def verdict(self) -> str:
        """`holds` or `fails`; "" without a bound."""
        if self.least is None and self.most is None:
            return ""
        return "holds" if self.holds else "fails"
