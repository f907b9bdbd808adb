"""`sluice chat` in a script: plain answers, one clear line for a mistake, and an exit status."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.tools.chat.conftest import Talking
from tests.gateway.tools.chat.pseudo_terminal import ROOT, at_terminal
from tests.serving import WAIT_SECS

INTERRUPTED = 130


def chat(*arguments: str, piped: bytes | None = None) -> "subprocess.CompletedProcess[bytes]":
    """Run it to its end; without `piped` it has no standard input."""
    return subprocess.run(
        [sys.executable, "-m", "gateway", "chat", *arguments],
        input=piped,
        stdin=subprocess.DEVNULL if piped is None else None,
        capture_output=True,
        timeout=WAIT_SECS * 2,
        cwd=ROOT,
        check=False,
    )


def mistake(*arguments: str, piped: bytes | None = None) -> str:
    """The error when it fails, which is one line and nothing on standard output."""
    ended = chat(*arguments, piped=piped)
    assert ended.returncode == 1
    assert ended.stdout == b""
    said = ended.stderr.decode()
    assert said.startswith("sluice: ")
    assert said.count("\n") == 1, said
    return said


@pytest.mark.parametrize("wire", ["grpc", "http"])
def test_the_answer_is_printed_plainly(talking: Talking, wire: str) -> None:
    ended = chat(*talking.flags(wire), "--once", "count 3")
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout == b"word0 word1 word2 \n"


def test_flags_become_the_system_prompt_and_the_sampling(talking: Talking) -> None:
    flags = [*talking.flags("grpc"), "--system", "Be brief."]
    assert b'{"role": "system", "content": "Be brief."}' in chat(*flags, "--once", "recall").stdout
    flags += ["--max-tokens", "5", "--temperature", "0"]
    said = chat("talker", *flags, "--once", "sampling").stdout
    assert said == b'{"max_tokens": 5, "temperature": 0.0}\n'


def test_what_is_piped_in_is_the_question_or_stands_behind_it(talking: Talking) -> None:
    assert chat(*talking.flags("grpc"), piped=b"count 2\n").stdout == b"word0 word1 \n"
    both = chat(*talking.flags("grpc"), "--once", "recall this:", piped="Straße\n".encode())
    assert '"recall this:\\n\\nStra\\u00dfe"' in both.stdout.decode()


def test_an_answer_goes_into_a_file_as_the_model_gave_it(talking: Talking, tmp_path: Path) -> None:
    assert chat(*talking.flags("grpc"), "--once", "steer").stdout.startswith(b"before\x1b]0;")
    with at_terminal("chat", *talking.flags("grpc"), "--once", "steer") as terminal:
        assert terminal.ended() == 0
        terminal.wait_shown("</think>")
        assert "\x1b]" not in terminal.written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--once", "refuse"), "the model says no"),
        (("--once", "no-template"), "model 'talker' has no chat template"),
        (("tlker", "--once", "x"), "did you mean 'talker'; ready: plain, talker"),
        (("bare", "--once", "x"), "model 'bare' is not ready"),
        (("plain", "--once", "x"), "model 'plain' cannot chat"),
        ((), "nothing to ask: give --once QUESTION, or pipe a question in"),
        (("--once", " "), "nothing to ask"),
    ],
)
def test_a_mistake_is_one_line_and_status_1(
    talking: Talking, arguments: tuple[str, ...], message: str
) -> None:
    assert message in mistake(*talking.flags("grpc"), *arguments)


def test_what_came_before_an_error_has_been_printed(talking: Talking) -> None:
    ended = chat(*talking.flags("grpc"), "--once", "refuse-late")
    assert ended.returncode == 1
    assert ended.stdout == b"so far so good\n"
    assert ended.stderr == b"sluice: the model gives up\n"


def test_several_models_that_can_chat_are_listed(talking: Talking) -> None:
    with talking.bare_loaded():
        said = mistake(*talking.flags("grpc"), "--once", "x")
    assert "several models can chat: bare, talker; name one" in said


@pytest.mark.parametrize("flags", [(), ("--http",)])
def test_without_a_server_it_says_how_to_start_one(
    flags: tuple[str, ...], unused_port: int
) -> None:
    said = mistake(*flags, "--url", f"localhost:{unused_port}", "--once", "x")
    assert "Connection refused" in said
    assert "start one with `sluice serve" in said


def test_what_is_piped_in_must_be_text(talking: Talking) -> None:
    said = mistake(*talking.flags("grpc"), piped=b"count \xff")
    assert "standard input is not UTF-8 text: invalid start byte at byte 6" in said


def test_an_argument_must_be_text(talking: Talking) -> None:
    broken = b"count \xff".decode(errors="surrogateescape")
    assert "is not UTF-8" in mistake(*talking.flags("grpc"), "--once", broken)
    assert "is not UTF-8" in mistake(
        *talking.flags("grpc"), "--system", broken, "--once", "count 1"
    )


def test_a_chat_needs_a_terminal_to_write_to(talking: Talking) -> None:
    master, slave = pty.openpty()
    ended = subprocess.run(
        [sys.executable, "-m", "gateway", "chat", *talking.flags("grpc")],
        stdin=slave,
        capture_output=True,
        timeout=WAIT_SECS,
        cwd=ROOT,
        check=False,
    )
    os.close(slave)
    os.close(master)
    assert ended.returncode == 1
    assert b"standard output is no terminal: ask one question, with --once" in ended.stderr


def running(talking: Talking, question: str) -> "subprocess.Popen[bytes]":
    """A question that is being answered: its first word has come."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "chat", *talking.flags("grpc"), "--once", question],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.read(5) == b"word0"
    return process


def test_ctrl_c_ends_it_with_status_130_and_the_model_stops(talking: Talking) -> None:
    with running(talking, "forever once") as process:
        process.send_signal(signal.SIGINT)
        said, complaint = process.communicate(timeout=WAIT_SECS)
    assert process.returncode == INTERRUPTED
    assert said.endswith(b"\n")
    assert complaint == b""
    talking.wait_stopped("forever once")


def test_a_closed_output_stops_the_model(talking: Talking) -> None:
    with running(talking, "forever piped") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        complaint = process.stderr.read()
        assert process.wait(WAIT_SECS) == 1
    assert complaint == b"sluice: standard output was closed before the answer was whole\n"
    talking.wait_stopped("forever piped")
