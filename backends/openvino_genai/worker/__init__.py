"""The folder of the Python-based backend: `model.py`, and its package `sluice_openvino_genai`."""
