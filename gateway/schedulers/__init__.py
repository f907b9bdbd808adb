"""Schedulers: queues of requests, and their executions on instances.

- `scheduler`: the seam between a model and its scheduler, and the parts of schedulers: free
  instances and their leases, the order of responses, timers below a millisecond
- `direct`, `dynamic`: schedulers of single requests and of batches
- `execution`: one call of an instance, its answers and its cancellation
- `queue`: queued requests, priorities and timeouts
- `batching`: rules for forming batches, and for waiting until more requests arrive
- `length_batching`: rules for batches of padded inputs, and measurements of their costs
- `rate_limiter`: turns of instances that need limited resources
"""
