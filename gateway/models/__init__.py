"""Models on disk and in memory, from the repository to the stream of a request.

Read in this order. On disk: `repository` (models, versions, configs), `single_model` (a repository
that is one model), `model_folder` (their files, a client's override), `normalisation` (defaults),
`config_checks` and `sequence_checks` (Triton's checks), `supported_fields` and
`supported_parameters` (honoured, ignored, refused), `instance_groups` (kinds, counts, GPUs, places
of instances), `replicas` (their number and placement in a fleet).

In memory: `registry` (known models, look-ups), `index` (its rows), `repository_control` (start,
polls, loads and unloads on request), `lifecycle` (loads, reloads, unloads), `loading` (versions),
`ensemble_members` (versions that ensembles call, failed loads), `loaded_models` (the task of each
loaded model, stalls).

One version: `model` (requests in flight), `request_validation`, `limits` (parameters), `instances`
(slots, restart, in-place update), `closings` (time limits), `reshaped_instance` (reshape),
`warmup` (samples), `cached_request` (response cache).
"""
