"""Sluice, an LLM-first streaming inference gateway that is a drop-in for Triton."""

__version__ = "0.2.0"
