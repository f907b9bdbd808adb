"""The product of the tables, and the rules by which a combination is impossible."""

from collections import Counter
from collections.abc import Sequence

from tests.sweep.subjects import SUBJECTS, Contract, Subject
from tests.sweep.ways import IN_PROCESS, WAYS, Way


def impossible(subject: Subject, way: Way) -> str:
    """The reason why no client can ask this model this way; empty if one can."""
    has_contract = subject.contract is Contract.OPENAI
    if way.openai != has_contract:
        return "only a model of OpenAI's contract is asked for chats, and it for nothing else"
    if subject.decoupled and not (way.streams or has_contract):
        return "a decoupled model is not asked by a request with one response"
    if subject.sequence and way.name.startswith("generate"):
        return "generate takes no correlation id for a sequence batcher"
    if subject.one_sequence and way.name != IN_PROCESS:
        return "requests of one sequence come one way, where their order is known"
    if subject.resumable and not way.name.startswith(("generate_stream", "ModelStreamInfer")):
        return "only streams of a wire are resumable"
    if subject.contract is Contract.OPENAI and way.name == IN_PROCESS:
        return "chats come by HTTP"
    return ""


def ways_of(subject: Subject, suffix: str) -> Sequence[Way]:
    """The ways to ask this model on one kind of server."""
    return [way for way in WAYS if way.suffix == suffix and not impossible(subject, way)]


def skipped() -> Counter[str]:
    """Each reason with the number of combinations that it excludes."""
    found = (impossible(subject, way) for subject in SUBJECTS for way in WAYS)
    return Counter(reason for reason in found if reason)
