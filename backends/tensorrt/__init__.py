"""Plans of TensorRT on NVIDIA GPUs.

Read in this order: `backend` loads a plan, `library` is the installed TensorRT and its failures,
`engines` have their tensors and are shared by instances, `checks` completes and checks configs,
`instance` runs a `plan` with `graphs` and `memory`. `cuda` has the calls of CUDA, `parameters` the
settings.
"""
