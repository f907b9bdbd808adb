"""`sluice chat` at a server that needs an API key."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gateway.policy.keys import Role, new_key
from tests.conformance.keys import stored, write
from tests.gateway.tools.chat.conftest import EXPLICIT, MODELS, Talking
from tests.gateway.tools.chat.pseudo_terminal import ROOT
from tests.serving import WAIT_SECS, serving, write_model

INFERS, OBSERVES = new_key(), new_key()
BOTH = frozenset({Role.INFER, Role.OBSERVE})


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talking]:
    folder = tmp_path_factory.mktemp("keys")
    repository = folder / "models"
    shutil.copytree(MODELS, repository)
    write_model(repository, "plain", 'backend: "identity"\n')
    infers = stored(INFERS, roles=frozenset({Role.INFER}))
    write(folder / "keys.toml", infers, stored(OBSERVES, roles=BOTH))
    with serving(repository, *EXPLICIT, f"--api-keys={folder / 'keys.toml'}") as server:
        yield Talking(server, repository)


def chat(key: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "gateway", "chat", *arguments, "--once", "count 2"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_SECS * 2,
        cwd=ROOT,
        env={**os.environ, "SLUICE_API_KEY": key},
        check=False,
    )


@pytest.mark.parametrize("wire", ["grpc", "http"])
def test_the_key_of_the_environment_is_sent_with_each_request(guarded: Talking, wire: str) -> None:
    answered = chat(OBSERVES[0], *guarded.flags(wire))
    assert (answered.stdout, answered.stderr) == ("word0 word1 \n", "")
    unlisted = chat(INFERS[0], *guarded.flags(wire))
    assert "lists no models: name one, as in `sluice chat MODEL`" in unlisted.stderr
    named = chat(INFERS[0], "talker", *guarded.flags(wire))
    assert (named.stdout, named.stderr) == ("word0 word1 \n", "")
    for key, text in (("", "the API key is missing"), ("x", "the API key is not valid")):
        refused = chat(key, "talker", *guarded.flags(wire))
        assert (refused.returncode, refused.stdout) == (1, "")
        assert refused.stderr.startswith(f"sluice: {text}")
    malformed = chat("a b", *guarded.flags(wire))
    assert malformed.stderr.startswith("sluice: SLUICE_API_KEY is no API key, expected plain")
