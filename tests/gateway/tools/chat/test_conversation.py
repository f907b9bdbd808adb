"""Conversations: kept turns, and the messages for the model."""

from gateway.tools.chat.conversation import ChatConversation


def said(conversation: ChatConversation, question: str, answer: str) -> None:
    turn = conversation.begin(question)
    turn.answer = answer
    conversation.end(turn)


def roles(conversation: ChatConversation, question: str) -> list[str]:
    return [each["role"] for each in conversation.messages(conversation.begin(question))]


def test_a_model_gets_all_turns_in_order() -> None:
    conversation = ChatConversation("Be brief.")
    said(conversation, "One?", "1")
    assert conversation.messages(conversation.begin("Two?")) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
    ]


def test_a_question_without_any_answer_is_not_kept_so_that_roles_alternate() -> None:
    conversation = ChatConversation()
    said(conversation, "One?", "")
    assert roles(conversation, "Two?") == ["user"]


def test_a_new_system_prompt_holds_from_the_next_question() -> None:
    conversation = ChatConversation()
    said(conversation, "One?", "1")
    conversation.system = "Be loud."
    assert roles(conversation, "Two?") == ["system", "user", "assistant", "user"]


def test_asking_again_replaces_the_answer() -> None:
    conversation = ChatConversation()
    said(conversation, "One?", "1")
    said(conversation, "Two?", "2")
    again = conversation.begin_again()
    assert again is not None
    assert [each["content"] for each in conversation.messages(again)] == ["One?", "1", "Two?"]
    again.answer = "two"
    conversation.end(again)
    assert [turn.answer for turn in conversation.turns] == ["1", "two"]


def test_asking_again_in_vain_keeps_the_earlier_answer() -> None:
    conversation = ChatConversation()
    said(conversation, "One?", "1")
    for _ in range(2):
        again = conversation.begin_again()
        assert again is not None
        assert again.question == "One?"
        conversation.end(again)
    assert [turn.answer for turn in conversation.turns] == ["1"]


def test_a_question_that_was_never_answered_can_be_asked_again() -> None:
    conversation = ChatConversation()
    said(conversation, "One?", "1")
    said(conversation, "Two?", "")
    again = conversation.begin_again()
    assert again is not None
    assert [each["content"] for each in conversation.messages(again)] == ["One?", "1", "Two?"]


def test_clear_drops_all_but_the_system_prompt() -> None:
    conversation = ChatConversation("Be brief.")
    said(conversation, "One?", "1")
    conversation.clear()
    assert conversation.begin_again() is None
    assert roles(conversation, "Two?") == ["system", "user"]


def test_the_document_has_all_turns_and_marks_interrupted_ones() -> None:
    conversation = ChatConversation("Be brief.")
    turn = conversation.begin("One?")
    turn.answer, turn.interrupted = "1, ", True
    conversation.end(turn)
    assert conversation.markdown("Chat with m", "m") == (
        "# Chat with m\n\n## System\n\nBe brief.\n\n## You\n\nOne?\n\n## m\n\n1,\n\n"
        "*(interrupted)*\n"
    )
