"""`--frontends N`: connections in processes of their own, in front of the one with the models."""
