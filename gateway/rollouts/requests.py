"""Requests of persons to change rollouts, of this server or of the controller of its fleet."""

from collections.abc import Mapping
from typing import Any

from gateway.rollouts.changes import RolloutAction, read_beginning
from gateway.rollouts.rollouts import Rollouts


async def change_rollout(
    rollouts: Rollouts, name: str, action: RolloutAction, members: Mapping[str, Any], by: str
) -> dict[str, Any]:
    """Change the rollout of a model; returns its new state. InferenceError as `Rollouts`."""
    if rollouts.controller is not None and rollouts.controller.state(name) is not None:
        await rollouts.controller.change(name, action, members, by)
    elif action is RolloutAction.START:
        (begun, plan) = read_beginning(members)
        await rollouts.start(
            *(name, begun.version, by), members=plan, reason=begun.reason, again=begun.again
        )
    else:
        rollouts.change(name, action, members, by)
    return rollouts.describe(name)
