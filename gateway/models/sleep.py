"""Sleep of the instances of a version: their slots are emptied, and filled again."""

import logging
from collections.abc import Coroutine, Sequence

from gateway.backend import Instance
from gateway.errors import Code, InferenceError
from gateway.models.instance_groups import InstanceSlot, load_slots

log = logging.getLogger("sluice.model")


async def empty_slot(slot: InstanceSlot, *, naps: bool) -> None:
    """Close the instance of a slot, or have it nap if it can; its last execution has ended."""
    instance = slot.instance
    if instance is None:
        return
    if naps and instance.sleeper is not None and instance.alive:
        try:
            await instance.sleeper.sleep()
        except Exception:  # around one instance: it is closed instead
            log.exception("instance not asleep", extra={"instance": slot.placement.name})
        else:
            slot.instance, slot.napping = None, instance
            return
    slot.instance = None
    await slot.closings.close(instance, slot.placement.name)


async def drop_naps(slots: Sequence[InstanceSlot]) -> None:
    """Close the instances that nap."""
    for slot in slots:
        instance, slot.napping = slot.napping, None
        if instance is not None:
            await slot.closings.close(instance, slot.placement.name)


async def load_spares(
    slots: Sequence[InstanceSlot], *, side_by_side: bool
) -> Sequence[InstanceSlot]:
    """Slots with an instance for each of the slots; those that nap wake.

    After an error none stays loaded or naps, and the error is raised.
    """

    def spare_of(slot: InstanceSlot) -> InstanceSlot:
        async def load() -> Instance:
            return await _woken(slot) or await slot.load()

        return InstanceSlot(load, slot.placement, closings=slot.closings)

    spares = [spare_of(slot) for slot in slots]
    try:
        await load_slots(spares, side_by_side=side_by_side)
    except BaseException:
        await drop_naps(slots)
        raise
    return spares


async def _woken(slot: InstanceSlot) -> Instance | None:
    """The instance that has napped in a slot; None without one, or if it does not wake."""
    instance = slot.napping
    if instance is None:
        return None
    if instance.alive and instance.sleeper is not None:
        try:
            await instance.sleeper.wake()
            if slot.check_woken is not None:
                await slot.check_woken(instance)
        except Exception:  # around one instance: it is closed, and another one loaded
            log.exception("instance not woken", extra={"instance": slot.placement.name})
        else:
            slot.napping = None
            return instance
    await drop_naps([slot])
    return None


async def attempted(change: Coroutine[None, None, None], model: str) -> InferenceError | None:
    """Run a change of a version's slots, and return its error."""
    try:
        await change
    except InferenceError as error:
        return error
    except Exception:
        # Around one model load: a runtime's own exception must not end the server.
        log.exception("loading failed", extra={"model": model})
        text = "loading failed unexpectedly; the server's log says why"
        return InferenceError(Code.INTERNAL, text)
    return None


def closing(model: str) -> InferenceError:
    """The error of a wake that its model's end has interrupted."""
    return InferenceError(Code.UNAVAILABLE, f"model '{model}' is being closed")
