"""The program that serves an estimator of scikit-learn, as the Python backend runs it."""

from sluice_sklearn.model import EstimatorModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
