"""A child process of a router with some tables, in place of `gateway.fleet.ray_directory`."""

import sys
from pathlib import Path

from gateway.fleet.ray_addresses import RayQuestion, RayTable, encode, read_question
from gateway.fleet.ray_news import ModelNews, read_news


def cluster_of(question: RayQuestion) -> str:
    """The cluster of this process: each has the next line of a file, if there is one."""
    clusters = "".join(question.fleet.values("--clusters"))
    if not clusters:
        return "one"
    first, *others = Path(clusters).read_text().splitlines()
    Path(clusters).write_text("\n".join(others))
    return first


if __name__ == "__main__":
    question = read_question(sys.stdin.buffer.readline())
    cluster = cluster_of(question)
    maker = "made" if question.makes_controller(cluster) else "found"
    troubles = {"m": "no node has 8 GPU"}
    tables = [
        RayTable(replicas=((maker, 1),), troubles=troubles, cluster=cluster),
        RayTable(replicas=((maker, 1), (question.fleet.name, 2)), cluster=cluster),
        *([RayTable(reason="GCS gone")] if question.fleet.values("--fails") else []),
    ]
    sys.stdout.buffer.write(b"\n".join(encode(each) for each in tables) + b"\n")
    if question.fleet.values("--hears"):
        sys.stdout.buffer.flush()
        news = read_news(sys.stdin.buffer.readline())
        models = {name: ModelNews(f"needs {need}") for name, need in news.needs.items()}
        sys.stdout.buffer.write(encode(RayTable(models=models, offers=news.offers)) + b"\n")
    if question.fleet.values("--garbles"):
        sys.stdout.buffer.write(b'{"replicas": [["r", "READY"]]}\n')
    if question.fleet.values("--ends"):
        sys.stdout.buffer.write(encode(tables[0])[:20])
