"""`sluice chat` at a terminal: keys, output and interrupts."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.tools.chat.conftest import EXPLICIT, MODELS, Talking
from tests.gateway.tools.chat.pseudo_terminal import CTRL_C, CTRL_D, PseudoTerminal, at_terminal
from tests.gateway.tools.chat.screen import Screen
from tests.serving import Serving, wait_until, write_model

PROMPT = "\n> "
CURSOR_HIDDEN, CURSOR_SHOWN = "\x1b[?25l", "\x1b[?25h"
TERMINATED = 143


@pytest.fixture(params=["grpc", "http"])
def wire(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def chat(talking: Talking) -> Iterator[PseudoTerminal]:
    with at_terminal("chat", *talking.flags("grpc")) as terminal:
        terminal.wait_shown(PROMPT)
        yield terminal


def ask(chat: PseudoTerminal, line: str) -> str:
    """Type a line; what is shown until the next prompt."""
    chat.enter(line)
    chat.wait_shown(f"{line}\n")
    return chat.wait_shown(PROMPT)


def test_the_greeting_names_the_model_and_the_keys(talking: Talking) -> None:
    with at_terminal("chat", *talking.flags("grpc")) as terminal:
        greeting = terminal.wait_shown(PROMPT)
        assert f"talker at {talking.server.grpc}" in greeting
        assert "/help" in greeting
        terminal.type(CTRL_D)
        assert terminal.ended() == 0


def test_an_answer_appears_with_its_pace_and_is_remembered(chat: PseudoTerminal) -> None:
    assert "5 tokens" in ask(chat, "count 5")
    shown = ask(chat, "recall")
    assert '{"role": "assistant", "content": "word0 word1' in shown
    assert "first token" in shown


def test_an_answer_is_drawn_as_markdown_once_and_whole(chat: PseudoTerminal) -> None:
    ask(chat, "document")
    screen = Screen(height=24)
    screen.write(chat.written)
    shown = screen.text
    assert [shown.count(text) for text in ("Title", "bold", "two lines", "code <b>")] == [1] * 4
    assert "**" not in shown
    assert " • one" in shown


def test_words_of_a_model_do_not_steer_the_terminal(chat: PseudoTerminal) -> None:
    assert "<think>aloud</think>" in ask(chat, "steer")
    assert "\x1b]0;" not in chat.written


def test_ctrl_c_interrupts_the_answer_and_the_chat_continues(talking: Talking, wire: str) -> None:
    with at_terminal("chat", *talking.flags(wire)) as chat:
        chat.wait_shown(PROMPT)
        chat.enter(f"forever at a terminal by {wire}")
        chat.wait_shown("word9 ")
        chat.type(CTRL_C)
        chat.wait_shown("interrupted")
        chat.wait_shown(PROMPT)
        talking.wait_stopped(f"forever at a terminal by {wire}")
        assert "word9 " in ask(chat, "recall")


def test_a_key_that_is_pressed_during_an_answer_waits_for_the_prompt(
    chat: PseudoTerminal,
) -> None:
    chat.enter("forever with keys")
    chat.wait_shown("word9 ")
    assert not chat.echoes
    chat.type("count 2")
    chat.type(CTRL_C)
    chat.wait_shown("interrupted")
    chat.wait_shown(PROMPT)
    assert "2 tokens" in ask(chat, "count 2")


def test_a_question_without_an_answer_yet_can_be_interrupted(
    chat: PseudoTerminal, talking: Talking
) -> None:
    chat.enter("silent")
    chat.wait_shown("waiting")
    chat.type(CTRL_C)
    chat.wait_shown("interrupted")
    chat.wait_shown(PROMPT)
    talking.wait_stopped("silent")
    assert "silent" not in ask(chat, "recall")


def test_ctrl_c_pressed_many_times_interrupts_the_answer_alone(chat: PseudoTerminal) -> None:
    chat.enter("forever and ever")
    chat.wait_shown("word9 ")
    chat.process.send_signal(signal.SIGINT)
    chat.process.send_signal(signal.SIGINT)
    chat.wait_shown("interrupted")
    chat.wait_shown(PROMPT)
    answer = ask(chat, "count 1")
    if "leaves" in answer:  # on a busy machine the second signal finds the prompt
        answer = ask(chat, "count 1")
    assert "1 token" in answer


def test_ctrl_c_twice_at_the_prompt_quits(chat: PseudoTerminal) -> None:
    chat.interrupt_input()
    chat.wait_shown("Ctrl-C again leaves")
    chat.wait_shown(PROMPT)
    ask(chat, "count 1")
    chat.interrupt_input()
    chat.wait_shown("Ctrl-C again leaves")
    chat.wait_shown(PROMPT)
    chat.interrupt_input()
    assert chat.ended() == 0


def test_ctrl_c_on_a_line_with_text_only_clears_it(chat: PseudoTerminal) -> None:
    for _ in range(3):
        chat.type("half a thou")
        chat.wait_shown("half a thou")
        chat.interrupt_input()
        chat.wait_shown(PROMPT)
    assert "1 token" in ask(chat, "count 1")
    assert "leaves" not in chat.shown.split(PROMPT, 1)[1]


def test_ctrl_d_and_quit_end_the_chat(talking: Talking) -> None:
    for farewell in (CTRL_D, "/quit\r"):
        with at_terminal("chat", *talking.flags("grpc")) as chat:
            chat.wait_shown(PROMPT)
            chat.type(farewell)
            assert chat.ended() == 0


def test_a_backslash_at_the_end_continues_the_line(chat: PseudoTerminal) -> None:
    chat.enter("recall one\\")
    chat.wait_shown("\n. ")
    chat.enter("two")
    assert '"recall one\\ntwo"' in chat.wait_shown(PROMPT)


def test_lines_can_be_called_back(chat: PseudoTerminal) -> None:
    ask(chat, "count 4")
    chat.type("\x1b[A\r")
    assert "4 tokens" in chat.wait_shown(PROMPT)


def test_commands_run_and_mistakes_are_errors(chat: PseudoTerminal, tmp_path: Path) -> None:
    assert "did you mean /help?" in ask(chat, "/hlep")
    assert "temperature = 0" in ask(chat, "/set temperature 0")
    assert "cut off at the limit of tokens" in ask(chat, "cut")
    assert "the model gives up" in ask(chat, "refuse-late")
    assert "so far so good" in ask(chat, "recall")
    assert "the model had nothing to say" in ask(chat, "nothing")
    ask(chat, f"/save {tmp_path / 'chat.md'}")
    assert "## talker\n\nThis is cut" in (tmp_path / "chat.md").read_text()


def test_one_of_several_models_is_chosen(talking: Talking) -> None:
    with (
        talking.bare_loaded(),
        at_terminal("chat", *talking.flags("grpc")) as chat,
    ):
        chat.wait_shown("1  bare\n2  talker\nmodel [1-2]: ")
        chat.enter("3")
        chat.wait_shown("expected a number from 1 to 2, or a name")
        chat.wait_shown("model [1-2]: ")
        chat.enter("2")
        assert "talker at" in chat.wait_shown(PROMPT)


def test_no_choice_of_a_model_ends_the_chat(talking: Talking) -> None:
    with talking.bare_loaded():
        for is_interrupted, status in ((False, 0), (True, 130)):
            with at_terminal("chat", *talking.flags("grpc")) as chat:
                chat.wait_shown("model [1-2]: ")
                if is_interrupted:
                    chat.interrupt_input()
                else:
                    chat.type(CTRL_D)
                assert chat.ended() == status


def test_a_termination_leaves_the_terminal_as_it_was(chat: PseudoTerminal) -> None:
    chat.enter("forever terminated")
    chat.wait_shown("word9 ")
    chat.process.send_signal(signal.SIGTERM)
    assert chat.ended() == TERMINATED
    assert chat.echoes
    wait_until(
        lambda: chat.written.rfind(CURSOR_SHOWN) > chat.written.rfind(CURSOR_HIDDEN),
        "the cursor is shown",
    )


def test_a_server_that_stops_in_mid_answer_can_be_asked_again(
    tmp_path: Path,
) -> None:
    shutil.copytree(MODELS, tmp_path / "models")
    write_model(tmp_path / "models", "plain", 'backend: "identity"\n')
    server = Serving(tmp_path / "models", EXPLICIT).wait_ready()
    port = server.ports["grpc"]
    with at_terminal("chat", "--url", server.grpc) as chat:
        chat.wait_shown(PROMPT)
        ask(chat, "count 2")
        chat.enter("forever until it is gone")
        chat.wait_shown("word9 ")
        server.stop(signal.SIGKILL)
        chat.wait_shown("no server answers at")
        assert "/retry" in chat.wait_shown(PROMPT)
        assert "no server answers at" in ask(chat, "count 3")
        again = Serving(tmp_path / "models", (*EXPLICIT, f"--grpc-port={port}")).wait_ready()
        try:
            shown = ask(chat, "recall")
        finally:
            again.stop()
    assert "word9 " in shown
    assert "forever until it is gone" in shown
