"""What of a loaded model may stay as it is when it is to be loaded again?"""

from collections.abc import Mapping
from dataclasses import replace

from gateway.config import ModelConfig
from gateway.models.dependencies import members
from gateway.models.model import Model
from gateway.models.model_folder import without_configs
from gateway.models.repository import Source
from gateway.models.table import Known


def is_served(known: Known, source: Source) -> bool:
    """Whether all that the source asks for was loaded from the very same files, and serves."""
    served = known.source
    if served is None or source.overridden or served.overridden:
        return False
    return served.snapshot == source.snapshot and all(model.ready for model in known.models)


def kept(known: Known, source: Source) -> Mapping[int, Model]:
    """The versions that only need other instances (in-place update), since nothing else differs.

    A client's config that changes nothing at all asks for a real load.
    """
    served = known.source
    if served is None or served.upload or source.upload or members(source.config):
        return {}
    if without_configs(served.snapshot) != without_configs(source.snapshot):
        return {}
    if source.overridden and source.config == served.config:
        return {}
    if _without_instances(source.config) != _without_instances(served.config):
        return {}
    return {int(model.version): model for model in known.models if model.ready}


def _without_instances(config: ModelConfig) -> ModelConfig:
    return replace(config, instance_group=(), version_policy=None)
