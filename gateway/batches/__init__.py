"""Tensors of batches, without I/O.

- `stacking`: inputs of several requests as one batch, outputs split again, and inputs that no
  client sends: batch inputs, and those of the sequence batcher
- `padding`: padded inputs and outputs, declared in the parameters of a config
- `shapes`: reshapes, and agreement of a config with its model
"""
