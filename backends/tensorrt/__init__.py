"""Plans of TensorRT on NVIDIA GPUs.

Read in this order: `backend` loads a plan, `library` is the installed TensorRT, `engines` are
shared by instances, `signature` has their tensors, `checks` completes and checks configs,
`instance` runs a `plan`: a `bound_profile` for each profile, `graphs`, `tensors` in `memory`.
`cuda` has the calls of CUDA, `parameters` the settings, `failures` the errors.
"""
