"""Models on disk and in memory, from the repository to the stream of a request.

Read in this order. On disk: `homes` (local folders, mirrors of
object storage), `mirrors` (their listings), `repository` (models, versions, configs), `fetching`
(files of a version in object storage), `single_model` (a repository
that is one model), `model_folder` (their files, a client's override), `normalisation` (defaults),
`config_checks` and `sequence_checks` (Triton's checks), `supported_fields` and
`supported_parameters` (honoured, ignored, refused), `instance_groups` (kinds, counts, GPUs, places
and slots of instances), `replicas` (their number and placement in a fleet).

In memory: `registry` (known models, look-ups), `index` (its rows), `repository_control` (start,
polls, loads and unloads on request), `lifecycle` (loads, reloads, unloads), `version_gate` (the
part of rollouts), `loading` (versions), `load_identity` (equal loads), `ensemble_members` (versions
that ensembles call, failed loads), `loaded_models` (the task of each loaded model, stalls).

More models than fit: `residence` (decisions), `residents` (the task that makes the changes),
`sleep` (empty slots), `memory` (sizes), `kept_facts` (on disk), `resident_readings` (metrics,
`sluice ps`).

One version: `model` (requests in flight), `taps` (observers of requests), `request_validation`,
`limits` (parameters), `instances` (slots, restart, in-place update), `closings` (time limits),
`reshaped_instance` (reshape), `warmup` (samples), `golden` and `golden_results` (requests with
expected answers), `cached_request` (response cache).
"""
