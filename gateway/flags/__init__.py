"""Options of `sluice serve`.

`serve` (all options, and those of HTTP and the process), `models`, `grpc`, `devices` (GPUs and CPU
cores), `exposure` (admin ports, `--public`), `cache`, `telemetry` (metrics, logs, traces), `values`
(types of values), `tritonserver` (options that only Triton has).
"""
