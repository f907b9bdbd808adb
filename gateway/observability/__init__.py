"""Statistics, metrics, logs and traces.

`request_record` times one request, `statistics` counts for a model, `metrics` names the values,
`exposition` writes them as text, `machine` reads CPUs and GPUs, `log` writes lines, `trace` holds
the events of one request, `span_trace` those that become `spans`, `tracer` selects the requests to
trace by their `sampling`, `otlp` sends spans as `otlp_wire` writes them.
"""
