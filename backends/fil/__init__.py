"""Forests of XGBoost, LightGBM and treelite.

Read in this order: `backend` loads a model, `parameters` reads its parameters, `model_file` finds
and reads its file, `forests` has what the libraries share (`xgboost_forest`, `lightgbm_forest`,
`treelite_forest`, each imported for its own files), `answers` makes outputs of their numbers, and
`instance` runs them.
"""
