"""Deltas from an object that the library continues to write to."""

from types import SimpleNamespace
from typing import Any

from backends.tensorrtllm.worker.sluice_tensorrtllm.deltas import DeltaReader


def sequence(index: int = 0) -> Any:
    return SimpleNamespace(
        index=index,
        text="",
        token_ids=[],
        finish_reason=None,
        stop_reason=None,
        cumulative_logprob=None,
        logprobs=None,
        request_perf_metrics=None,
    )


def test_a_growing_output_is_read_in_deltas() -> None:
    progress, one = DeltaReader(9), sequence()
    output = SimpleNamespace(outputs=[one], finished=False)
    one.text, one.token_ids = "Hel", [1]
    (first,) = progress.read(output)
    one.text, one.token_ids = "Hello", [1, 2, 3]
    (second,) = progress.read(output)
    assert [(first.text, first.tokens), (second.text, second.tokens)] == [("Hel", 1), ("lo", 2)]


def test_half_a_character_waits_for_its_rest() -> None:
    progress, one = DeltaReader(9), sequence()
    output = SimpleNamespace(outputs=[one], finished=False)
    one.text = "a\ufffd"
    assert progress.read(output)[0].text == "a"
    one.text = "aé"
    assert progress.read(output)[0].text == "é"
    one.text, one.finish_reason = "aé\ufffd", "length"
    assert progress.read(output)[0].text == "\ufffd"


def test_text_removed_by_a_stop_word_is_not_sent_again() -> None:
    progress, one = DeltaReader(9), sequence()
    output = SimpleNamespace(outputs=[one], finished=False)
    one.text, one.token_ids = "end ST", [1, 2]
    progress.read(output)
    one.text, one.finish_reason, one.stop_reason = "end ", "stop", "STOP"
    (change,) = progress.read(output)
    assert (change.text, change.tokens, change.stop_reason) == ("", 0, "STOP")


def test_sequences_come_in_the_order_of_their_indices() -> None:
    progress = DeltaReader(9)
    first, second = sequence(0), sequence(1)
    first.text, second.text = "a", "b"
    assert [
        each.text
        for each in progress.read(SimpleNamespace(outputs=[second, first], finished=False))
    ] == [
        "a",
        "b",
    ]


def test_log_probabilities_are_those_of_new_tokens() -> None:
    progress, one = DeltaReader(9), sequence()
    output = SimpleNamespace(outputs=[one], finished=False)
    for token in (5, 6):
        one.token_ids, one.logprobs = [*one.token_ids, token], [*(one.logprobs or []), -token]
        (change,) = progress.read(output)
        assert [(e.chosen.token, e.chosen.logprob) for e in change.logprobs] == [(token, -token)]


def test_a_sequence_without_a_reason_has_one_at_the_end() -> None:
    progress, long, short = DeltaReader(2), sequence(0), sequence(1)
    long.token_ids, short.token_ids = [1, 2], [1]
    output = SimpleNamespace(outputs=[long, short], finished=False)
    assert [each.finish_reason for each in progress.read(output)] == [None, None]
    output.finished = True
    assert [each.finish_reason for each in progress.read(output)] == ["length", "stop"]
