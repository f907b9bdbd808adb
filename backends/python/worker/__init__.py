"""The folder on the path of a worker: `sluice_worker`, and the modules that model.py imports.

`triton_python_backend_utils` is the API; `c_python_backend_utils` is its second name.
"""
