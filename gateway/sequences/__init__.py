"""The sequence batcher: requests of a sequence execute in order on one instance.

- `scheduler`: the scheduler of a model with sequences, and its checks of requests
- `instance_sequences`: the sequences and executions of one instance
- `table`: open sequences, slots and the backlog
- `ready_requests`: rules for forming batches
- `inputs`: control inputs, implicit states, and executions with rows for empty slots
"""
