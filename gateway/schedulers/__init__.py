"""Schedulers: queues of requests, and their executions on instances.

- `scheduler`: the seam between a model and its scheduler
- `direct`, `dynamic`: schedulers of single requests and of batches
- `execution`: one call of an instance, its answers and its cancellation
- `queue`: queued requests, priorities and timeouts
- `batching`, `length_batching`: rules for forming batches
- `calibration`: measured costs of batches
- `response_order`: responses in the order of requests
- `free_instances`: free instances and their leases
- `rate_limiter`: turns of instances that need limited resources
- `timer`: timers below a millisecond
"""
