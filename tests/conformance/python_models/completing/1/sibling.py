"""A module beside the model."""


def doubled(x):
    return x * 2
