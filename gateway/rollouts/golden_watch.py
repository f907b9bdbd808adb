"""The guardrail `golden`: golden requests that a candidate answers again during its rollout."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from gateway.errors import InferenceError
from gateway.models.golden.answer import GoldenAnswer
from gateway.models.golden.reading import GoldenRequest, read_golden
from gateway.models.golden.similarity import Find, cosine
from gateway.models.golden.tensor_checks import Mismatch
from gateway.models.golden.text_checks import Skipped
from gateway.models.model import Model
from gateway.observability.statistics import ModelStatistics
from gateway.rollouts.copying import copied
from gateway.rollouts.evidence import Evidence
from gateway.rollouts.model_rollouts import ModelRollouts
from gateway.threads import Threads

log = logging.getLogger("sluice.rollouts")


async def watch_golden(
    of_model: ModelRollouts, evidence: Evidence, threads: Threads, find: Find
) -> None:
    """Ask all golden requests in each interval of the guardrail, while the evidence is in use.

    They have the lowest priority, and count in no statistics. A candidate that is asleep is not
    asked: the time of its load is no evidence.
    """
    while (candidate := _candidate(of_model, evidence)) is not None:
        is_asleep = candidate.instances.asleep
        requests = () if is_asleep else await _read(of_model, candidate, threads)
        try:
            failure = await _first_failure(requests, candidate, find)
        except Exception:  # around one round: the rollout and the server continue
            log.exception("golden requests not sent", extra=_about(candidate))
        else:
            if _candidate(of_model, evidence) is candidate and requests:
                _count(of_model, evidence, failure)
        await asyncio.sleep(evidence.guardrails.golden_secs or 0.0)


def _about(candidate: Model) -> dict[str, str]:
    return {"model": candidate.name, "version": candidate.version}


def _candidate(of_model: ModelRollouts, evidence: Evidence) -> Model | None:
    if of_model.choice is None or of_model.evidence is not evidence:
        return None
    return of_model.choice.candidate


async def _read(
    of_model: ModelRollouts, candidate: Model, threads: Threads
) -> Sequence[GoldenRequest]:
    about = _about(candidate)
    if of_model.known.source is None:
        return ()
    folder = replace(of_model.known.source, tree=candidate.tree).folder
    try:
        found = await threads.run(read_golden, candidate.config, folder, int(candidate.version))
    except InferenceError as error:
        log.error("golden requests not read", extra={**about, "reason": error.message})
        return ()
    if not found:
        log.warning("guardrail 'golden' has no golden request", extra=about)
    return found


async def _first_failure(requests: Sequence[GoldenRequest], candidate: Model, find: Find) -> str:
    for golden in requests:
        if failure := await _failure(golden, candidate, find):
            return failure
    return ""


async def _failure(golden: GoldenRequest, candidate: Model, find: Find) -> str:
    """The failure of one request; none if it is refused: other guardrails count that."""
    statistics, answer = ModelStatistics.of(candidate.config), GoldenAnswer()
    try:
        stream = candidate.copy(copied(golden.request, candidate), statistics)
    except InferenceError:
        return ""
    try:
        async with asyncio.timeout(golden.secs):
            await answer.read(stream)
        await golden.expected.check(answer, partial(cosine, find))
    except TimeoutError:
        return f"golden request '{golden.name}': not answered within {golden.secs:g} s"
    except Skipped:
        return ""
    except Mismatch as mismatch:
        return f"golden request '{golden.name}': {mismatch}"
    return ""


def _count(of_model: ModelRollouts, evidence: Evidence, failure: str) -> None:
    rollout, breach = of_model.open, evidence.golden(failure)
    if failure:
        about = {"model": str(of_model.known.id), "reason": failure}
        log.warning("golden request failed", extra=about)
    if rollout is not None and breach is not None:
        rollout.breach(breach.guardrail, breach.reason)
        of_model.changed()
