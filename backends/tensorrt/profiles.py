"""Which optimisation profile serves an execution best?"""

from collections.abc import Mapping, Sequence

from backends.tensorrt.signature import Profile, Shape
from gateway.errors import Code, InferenceError
from gateway.tensor import format_shape


def closest(profiles: Mapping[int, Profile], shapes: Mapping[str, Shape], where: str) -> int:
    """The index of the profile that allows these shapes, and whose best are nearest to them.

    `where` names model and device. Raises InferenceError INVALID_ARG if none allows them, with
    what each would.
    """
    found = [index for index, profile in profiles.items() if not refusals(profile, shapes)]
    if found:
        return min(found, key=lambda index: _distance(profiles[index], shapes))
    wrong = dict.fromkeys(each for some in profiles.values() for each in refusals(some, shapes))
    allowed = "; ".join(
        f"profile {index} takes {_ranges(profile, list(wrong))}"
        for index, profile in profiles.items()
    )
    given = ", ".join(f"'{name}' has shape {format_shape(shapes[name])}" for name in wrong)
    raise InferenceError(
        Code.INVALID_ARG,
        f"{where}: {given}, which no optimization profile of the instance allows: {allowed}; send "
        "such shapes, or name another profile in instance_group",
    )


def refusals(profile: Profile, shapes: Mapping[str, Shape]) -> Sequence[str]:
    """The inputs whose shape the profile does not allow."""
    return [name for name, each in profile.items() if not each.allows(shapes[name])]


def _distance(profile: Profile, shapes: Mapping[str, Shape]) -> int:
    return sum(each.distance(shapes[name]) for name, each in profile.items())


def _ranges(profile: Profile, names: Sequence[str]) -> str:
    return ", ".join(
        f"'{name}' from {format_shape(profile[name].least)} to {format_shape(profile[name].most)}"
        for name in names
    )
