"""What may a backend add to a configuration, once it has looked at the model?"""

from dataclasses import replace

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.models.defaults import fill_defaults
from gateway.models.normalisation import check_config, check_tensors

CHOICES = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")


def completed(config: ModelConfig, said: ModelConfig) -> ModelConfig:
    """The config with what the backend said of it, as far as that is a backend's to say.

    That is the batch size, inputs, outputs, the transaction policy, and a scheduling choice where
    there was none (auto-complete). Raises INVALID_ARG for what is incomplete even then, INTERNAL
    for a choice that the backend changed.
    """
    whole = fill_defaults(
        replace(
            _scheduled(config, said),
            max_batch_size=said.max_batch_size,
            input=said.input,
            output=said.output,
            model_transaction_policy=said.model_transaction_policy,
        )
    )
    check_config(whole)
    check_tensors(whole)
    return whole


def _scheduled(config: ModelConfig, said: ModelConfig) -> ModelConfig:
    before, after = _choice(config), _choice(said)
    if not before:
        return replace(
            config,
            dynamic_batching=said.dynamic_batching,
            sequence_batching=said.sequence_batching,
        )
    if after != before:
        raise InferenceError(
            Code.INTERNAL,
            f"Cannot update scheduling choice from {before} to {after or 'none'} when "
            "auto-completing.",
        )
    return config


def _choice(config: ModelConfig) -> str:
    return next((each for each in CHOICES if getattr(config, each) is not None), "")
