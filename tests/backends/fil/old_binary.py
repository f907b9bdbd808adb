"""An old binary of XGBoost (until 2.0) for the tests: today's library does not write it."""

import struct

FEATURES = 5
LEAVES = (-0.4, 0.7)


def old_binary(objective: str = "binary:logistic") -> bytes:
    """One tree: feature 0 below 0.5 is the first of LEAVES, else the second; missing is first."""
    learner = struct.pack("<fIiiiII108x", 0.5, FEATURES, 0, 0, 0, 1, 7)
    trees = struct.pack("<iiii", 1, 1, FEATURES, 0) + struct.pack("<qii128x", 0, 1, 0)
    tree = struct.pack("<iiiiii124x", 1, 3, 0, 1, FEATURES, 0)
    default_left = 1 << 31
    nodes = struct.pack("<iiiIf", -1, 1, 2, default_left, 0.5)
    nodes += struct.pack("<iiiIf", default_left - (1 << 32), -1, -1, 0, LEAVES[0])
    nodes += struct.pack("<iiiIf", 0, -1, -1, 0, LEAVES[1])
    statistics = b"".join(struct.pack("<fffi", 1, 1, 0, 0) for _ in range(3))
    head = b"binf" + learner + _text(objective) + _text("gbtree")
    return head + trees + tree + nodes + statistics + struct.pack("<i", 0)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
