"""Forests of XGBoost, LightGBM and treelite.

Read in this order: `backend` loads a model, `parameters` reads its parameters, `model_file` finds
and reads its file, `forests` are the libraries, `answers` makes outputs of their numbers, and
`instance` runs them.
"""
