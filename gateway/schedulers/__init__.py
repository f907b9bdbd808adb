"""Schedulers: queues of requests, and their executions on instances.

- `scheduler`: the interface of schedulers, the default scheduler, which executes each request by
  itself, and the parts of schedulers: free instances and their leases, timers
- `dynamic`: the scheduler of batches
- `execution`: one call of an instance, its answers, their order, and its cancellation
- `queue`: queued requests, priorities and timeouts
- `batching`: rules for forming batches, and for waiting until more requests arrive
- `length_batching`: rules for batches of padded inputs, and measurements of their costs
- `rate_limiter`: turns of instances that need limited resources
"""
