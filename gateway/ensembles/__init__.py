"""Ensembles: models whose requests flow through other models.

- `backend`: the backend and the instance of an ensemble
- `graph`: steps, tensors between them, and members
- `run`: the execution of one request
- `steps`: loaded steps, their calls and limits, and data flows
- `tensors`: requests of steps, their responses, and the ensemble's own
- `checks`: checks of the config and of the members
"""
