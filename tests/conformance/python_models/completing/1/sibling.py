"""A module in the folder of the model."""


def doubled(x):
    return x * 2
