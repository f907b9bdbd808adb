"""Models on disk and in memory, from the repository to the stream of a request.

Read in this order. On disk: `repository` (models, versions, configs), `model_folder` (their
files), `upload` (a client's override), `normalisation` (defaults), `config_checks` and
`sequence_checks` (Triton's checks), `supported_fields` (honoured, ignored, refused),
`instance_groups` (kinds, counts, GPUs).

In memory: `registry` (the face), `table` (look-ups, index), `lifecycle` (loads, reloads, unloads),
`poller` (changes on disk), `version_loads` and `load_failures` (concurrent loads, their errors),
`loading` (one version), `ensemble_members` (versions that ensembles call), `model_tasks` (the task
of each loaded model), `progress` (stalls).

One version: `model` (requests in flight), `validation` (request checks), `limits` (parameters),
`instances` (restart, in-place update), `instance_slots` (placement, load, close), `closings` (time
limits), `reshaped_instance` (reshape), `warmup` (samples), `cached_request` (response cache),
`busy_poll` (the event loop between requests).
"""
