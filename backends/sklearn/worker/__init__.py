"""The folder of the Python-based backend: `model.py`, and its package `sluice_sklearn`."""
