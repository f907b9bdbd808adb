"""The sequence batcher: requests of a sequence execute in order on one instance.

- `scheduler`: the scheduler of a model with sequences
- `instance_sequences`: the sequences and executions of one instance
- `table`: open sequences, slots and the backlog
- `ready_requests`: rules for forming batches
- `inputs`: control inputs and implicit states
- `padded_execution`: executions with these inputs, and with rows for empty slots
- `admission`: checks of requests
"""
