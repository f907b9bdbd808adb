"""Estimators of scikit-learn, each instance in a worker process of the Python backend.

Read in this order: `backend` completes configs and refuses pickles without permission, `instance`
requests `predict` where a request names no output, `worker` is the program in the worker process.
"""
