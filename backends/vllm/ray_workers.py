"""The placement group of the Ray workers of an engine, one for each of its GPUs."""

from typing import Any

SETTING = "placement-group"
"""The backend setting with the id of the group that a replica on Ray has, in hexadecimal digits."""


def hand_group(parallel_config: Any, group: str) -> None:
    """Give the workers of an engine that group, if Ray is to have them; "" for none.

    Otherwise vLLM makes a second group. A name would be looked up by a driver of Ray, which ends
    with the cluster; this process is none.
    """
    if not (group and parallel_config.use_ray):
        return
    # Imported here: other engines need no Ray.
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    parallel_config.placement_group = PlacementGroup(PlacementGroupID.from_hex(group))
