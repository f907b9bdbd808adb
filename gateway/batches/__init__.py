"""Tensors of batches, without I/O.

- `stacking`: inputs of several requests as one batch, and outputs split again
- `padding`: padded inputs and outputs, declared in the parameters of a config
- `extra_inputs`: batch inputs, and the inputs of the sequence batcher
- `shapes`: reshapes, and agreement of a config with its model
"""
