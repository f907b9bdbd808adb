"""Lines at the prompt: questions and commands."""

from pathlib import Path

import pytest

from gateway.tools.chat import slash_commands
from gateway.tools.chat.conversation import Session
from gateway.tools.chat.server import AnswerPart, ChatError, Refused
from gateway.tools.chat.slash_commands import COMMANDS, Ask, Leave, Say
from tests.gateway.tools.chat.played import PlayedServer, session


@pytest.fixture
def server() -> PlayedServer:
    return PlayedServer(AnswerPart("Hello "), AnswerPart("there."))


@pytest.fixture
def chat(server: PlayedServer) -> Session:
    return session(server)


def say(chat: Session, line: str) -> str:
    outcome = slash_commands.read(chat, line)
    assert isinstance(outcome, Say)
    return outcome.text


async def ask(chat: Session, line: str) -> list[str]:
    outcome = slash_commands.read(chat, line)
    assert isinstance(outcome, Ask)
    return [part.text async for part in chat.answer(outcome.turn)]


def contents(server: PlayedServer) -> list[str]:
    return [each["content"] for each in server.asked[-1].messages]


async def test_a_line_is_a_question_and_its_answer_is_remembered(
    chat: Session, server: PlayedServer
) -> None:
    assert await ask(chat, " Hi ") == ["Hello ", "there."]
    await ask(chat, "And?")
    assert contents(server) == ["Hi", "Hello there.", "And?"]


def test_an_empty_line_is_nothing(chat: Session) -> None:
    assert say(chat, "  ") == ""


async def test_two_slashes_begin_a_question_with_one(chat: Session, server: PlayedServer) -> None:
    await ask(chat, "//etc/hosts, what is it?")
    assert contents(server) == ["/etc/hosts, what is it?"]


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("/hlep", "did you mean /help?"),
        ("/Retry now", "did you mean /retry?"),
        ("/xyz", "/help lists"),
        ("/", "/help lists"),
    ],
)
def test_an_unknown_command_names_the_nearest(chat: Session, line: str, fix: str) -> None:
    with pytest.raises(ChatError) as caught:
        slash_commands.read(chat, line)
    assert fix in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_lists_every_command(chat: Session) -> None:
    text = say(chat, "/help")
    assert all(f"/{name}" in text for name in COMMANDS)


def test_quit_ends_the_chat(chat: Session) -> None:
    assert isinstance(slash_commands.read(chat, "/quit"), Leave)


async def test_the_system_prompt_is_set_shown_and_removed(
    chat: Session, server: PlayedServer
) -> None:
    assert say(chat, "/system") == "system prompt: none"
    say(chat, "/system Be  brief.")
    assert say(chat, "/system") == "system prompt: Be  brief."
    await ask(chat, "Hi")
    assert contents(server) == ["Be  brief.", "Hi"]
    say(chat, '/system ""')
    await ask(chat, "Hi")
    assert contents(server)[0] == "Hi"


async def test_set_changes_the_sampling_of_the_next_question(
    chat: Session, server: PlayedServer
) -> None:
    assert say(chat, "/set temperature 0.5") == "temperature = 0.5"
    assert say(chat, '/set stop = ["a", "b"]') == 'temperature = 0.5, stop = ["a", "b"]'
    assert say(chat, "/set temperature") == "temperature is the model's own again"
    assert say(chat, "/set") == 'stop = ["a", "b"]'
    await ask(chat, "Hi")
    assert server.asked[-1].sampling == {"stop": ["a", "b"]}


def test_what_is_not_set_cannot_be_unset(chat: Session) -> None:
    with pytest.raises(ChatError, match="'top_p' is not set"):
        slash_commands.read(chat, "/set top_p")


async def test_retry_asks_the_latest_question_again(chat: Session, server: PlayedServer) -> None:
    await ask(chat, "One?")
    await ask(chat, "Two?")
    await ask(chat, "/retry")
    assert contents(server) == ["One?", "Hello there.", "Two?"]
    assert len(chat.conversation.turns) == 2


def test_retry_needs_a_question(chat: Session) -> None:
    with pytest.raises(ChatError, match="nothing was asked yet"):
        slash_commands.read(chat, "/retry")


async def test_clear_drops_the_conversation(chat: Session, server: PlayedServer) -> None:
    await ask(chat, "One?")
    say(chat, "/clear")
    await ask(chat, "Two?")
    assert contents(server) == ["Two?"]


async def test_save_writes_markdown_and_again_after_more_turns(
    chat: Session, tmp_path: Path
) -> None:
    file = tmp_path / "a chat.md"
    await ask(chat, "One?")
    assert say(chat, f"/save '{file}'") == f"saved to {file}"
    await ask(chat, "Two?")
    say(chat, f"/save '{file}'")
    assert file.read_text().startswith("# Chat with m\n\n## You\n\nOne?\n\n## m\n\nHello there.")
    assert "Two?" in file.read_text()


def test_save_overwrites_no_other_file(chat: Session, tmp_path: Path) -> None:
    file = tmp_path / "notes.md"
    file.write_text("mine")
    with pytest.raises(ChatError, match="exists: choose another name"):
        slash_commands.read(chat, f"/save {file}")
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/save", "needs one file"),
        ("/save a b", "needs one file"),
        ("/save 'a", "needs one file"),
        ("/save /no-such-folder/a.md", "cannot be written: No such file or directory"),
    ],
)
def test_a_failed_save_is_an_error(chat: Session, line: str, message: str) -> None:
    with pytest.raises(ChatError, match=message):
        slash_commands.read(chat, line)


async def test_the_received_part_of_a_cancelled_answer_is_kept() -> None:
    server = PlayedServer(AnswerPart("Hello "), AnswerPart("there."))
    chat = session(server)
    turn = chat.conversation.begin("Hi")
    answer = chat.answer(turn)
    assert (await anext(answer)).text == "Hello "
    await answer.aclose()
    assert server.left == 1
    assert [(each.answer, each.interrupted) for each in chat.conversation.turns] == [
        ("Hello ", True)
    ]


async def test_the_received_part_of_a_failed_answer_is_kept() -> None:
    chat = session(PlayedServer(AnswerPart("Hello "), Refused("no more")))
    with pytest.raises(Refused, match="no more"):
        await ask(chat, "Hi")
    assert [each.answer for each in chat.conversation.turns] == ["Hello "]
