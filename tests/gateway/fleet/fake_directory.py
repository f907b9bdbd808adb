"""A child process of a router with some tables, in place of `gateway.fleet.ray_directory`."""

import sys

from gateway.fleet.ray_addresses import RayTable, encode, read_question

if __name__ == "__main__":
    question = read_question(sys.stdin.buffer.readline())
    maker = "made" if question.makes_controller else "found"
    tables = [
        RayTable(replicas=((maker, 1),), troubles={"m": "no node has 8 GPU"}),
        RayTable(replicas=((maker, 1), (question.fleet.name, 2))),
        *([RayTable(reason="GCS gone")] if question.fleet.values("--fails") else []),
    ]
    sys.stdout.buffer.write(b"\n".join(encode(each) for each in tables) + b"\n")
    if question.fleet.values("--ends"):
        sys.stdout.buffer.write(encode(tables[0])[:20])
