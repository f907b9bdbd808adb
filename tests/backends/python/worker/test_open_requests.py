"""Response senders: their rules, and that they outlive the execution."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from backends.python.worker.sluice_worker.open_requests import InferenceResponseSender, OpenRequests
from backends.python.worker.sluice_worker.protocol import ToGateway, ToWorker
from tests.backends.python.worker.gateway import PlayedGateway, probe, told
from tests.builders import settle

Number = Callable[[], int]
CLOSED = "TritonModelException: Unable to send response. Response sender has been closed."
NOTHING = (
    "TritonModelException: Inference Response object must be provided when the response flags is "
    "set to zero."
)
UNSUPPORTED = "TritonModelException: Unable to send response. Unsupported flag provided."
EARLY = (
    "TritonModelException: Unable to send response. Non-decoupled model cannot send complete final "
    "before sending a response."
)
SECOND = (
    "TritonModelException: Unable to send response. Non-decoupled model cannot send more than one "
    "response."
)


def test_rules_of_a_model_that_is_not_decoupled(probed: PlayedGateway, number: Number) -> None:
    asked = number()
    code = """
send = requests[0].get_response_sender().send
self.kept["seen"] = [
    caught(send), caught(send, numbers(1), 2), caught(send, flags=1),
    caught(send, numbers(1)), caught(send, numbers(2)), caught(send, flags=1),
    caught(send, numbers(3), 1), caught(send, flags=1),
    caught(send, 5).split(",")[0],
]
"""
    assert probe(probed, asked, code)[:2] == [None, []]
    first, flag = (probed.hear(ToGateway.RESPONSE).values for _ in range(2))
    assert (first[0], first[1][1], first[2]) == (asked, None, False)
    assert flag == [asked, None, True]
    seen = told(probed, number(), "return [texts(*self.kept['seen'])]")
    wrong = "TypeError: response must be an InferenceResponse"
    assert seen == [NOTHING, UNSUPPORTED, EARLY, "None", SECOND, "None", SECOND, CLOSED, wrong]


def test_rules_of_a_decoupled_model(decoupled: PlayedGateway, number: Number) -> None:
    asked = number()
    code = """
send = requests[0].get_response_sender().send
seen = [caught(send), caught(send, numbers(1)), caught(send, numbers(2)), caught(send, flags=3)]
seen += [caught(send, texts(*seen), 1), caught(send, numbers(3)), caught(send, flags=1)]
self.kept["seen"] = seen
"""
    assert probe(decoupled, asked, code)[:2] == [None, []]
    heard = [decoupled.hear(ToGateway.RESPONSE).values for _ in range(3)]
    assert [(each[0], each[2]) for each in heard] == [(asked, False), (asked, False), (asked, True)]
    code = "requests[0].get_response_sender().send(texts(*self.kept['seen']), 1)"
    assert probe(decoupled, number(), code)[:2] == [None, []]
    heard_last = decoupled.hear(ToGateway.RESPONSE)
    text = bytes(heard_last.body).decode()
    for each in (NOTHING, UNSUPPORTED, CLOSED):
        assert each in text


def test_an_empty_final_response_is_the_flag_alone(
    decoupled: PlayedGateway, number: Number
) -> None:
    asked = number()
    probe(decoupled, asked, "requests[0].get_response_sender().send(flags=1)")
    assert decoupled.hear(ToGateway.RESPONSE).values == [asked, None, True]


def test_a_thread_may_send_after_execute_has_returned(
    probed: PlayedGateway, number: Number
) -> None:
    asked = number()
    code = """
import threading
go = self.kept["go"] = threading.Event()
sender = requests[0].get_response_sender()
def later():
    go.wait(20)
    sender.send(numbers(7), 1)
threading.Thread(target=later).start()
return [None]
"""
    assert probe(probed, asked, code)[:2] == [None, []]
    assert told(probed, number(), "self.kept['go'].set()\nreturn [texts('gone')]") == ["gone"]
    heard = probed.hear(ToGateway.RESPONSE)
    assert (heard.values[0], heard.values[2]) == (asked, True)


def test_responses_of_many_threads_arrive_whole_and_end_with_the_flag(
    decoupled: PlayedGateway, number: Number
) -> None:
    asked = number()
    code = """
import threading
send = requests[0].get_response_sender().send
def many(first):
    for value in range(first, first + 100):
        send(numbers(*[value] * 50))
threads = [threading.Thread(target=many, args=(first,)) for first in (0, 100, 200, 300)]
for each in threads: each.start()
for each in threads: each.join()
send(flags=1)
"""
    assert probe(decoupled, asked, code)[0] is None
    heard = [decoupled.hear(ToGateway.RESPONSE) for _ in range(401)]
    firsts = []
    for each in heard[:-1]:
        values = decoupled.arrays(each.values[1][0], each.body)["y"]
        assert len(set(values.tolist())) == 1
        firsts.append(values[0])
    assert sorted(firsts) == list(range(400))
    assert heard[-1].values == [asked, None, True]


def test_a_dropped_sender_ends_its_stream_with_an_error(
    decoupled: PlayedGateway, number: Number
) -> None:
    asked = number()
    probe(decoupled, asked, "requests[0].get_response_sender().send(numbers(1))")
    assert decoupled.hear(ToGateway.RESPONSE).values[2] is False
    last = decoupled.hear(ToGateway.RESPONSE).values
    assert (last[0], last[1][1][0], last[2]) == (asked, "INTERNAL", True)


def test_a_dropped_sender_that_has_answered_lacks_only_the_flag(
    probed: PlayedGateway, number: Number
) -> None:
    asked = number()
    probe(probed, asked, "requests[0].get_response_sender().send(numbers(1))")
    assert probed.hear(ToGateway.RESPONSE).values[2] is False
    assert probed.hear(ToGateway.RESPONSE).values == [asked, None, True]


def test_an_exception_closes_the_senders_of_its_execution(
    decoupled: PlayedGateway, number: Number
) -> None:
    code = """
sender = self.kept["sender"] = requests[0].get_response_sender()
sender.send(numbers(1))
raise ValueError("mid")
"""
    error, _, _ = probe(decoupled, number(), code)
    assert error[0] == "ValueError: mid"
    decoupled.hear(ToGateway.RESPONSE)
    code = """
seen = caught(self.kept.pop("sender").send, numbers(2))
requests[0].get_response_sender().send(texts(seen), 1)
"""
    probe(decoupled, number(), code)
    assert CLOSED in bytes(decoupled.hear(ToGateway.RESPONSE).body).decode()


def test_cancellation_reaches_request_and_sender(decoupled: PlayedGateway, number: Number) -> None:
    asked = number()
    code = """
self.kept["it"] = requests[0], requests[0].get_response_sender()
self.kept["it"][1].send(numbers(requests[0].is_cancelled()))
"""
    probe(decoupled, asked, code)
    decoupled.hear(ToGateway.RESPONSE)
    decoupled.say(ToWorker.CANCEL, asked)
    decoupled.ping()
    code = """
request, sender = self.kept.pop("it")
seen = repr((request.is_cancelled(), sender.is_cancelled(), requests[0].is_cancelled()))
sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("stopped", 7)), 1)
requests[0].get_response_sender().send(texts(seen), 1)
"""
    probe(decoupled, number(), code)
    last = decoupled.hear(ToGateway.RESPONSE).values
    assert last == [asked, [[], ["CANCELLED", "stopped"], None], True]
    assert b"(True, True, False)" in bytes(decoupled.hear(ToGateway.RESPONSE).body)


def test_a_cancellation_may_come_before_its_request(
    decoupled: PlayedGateway, number: Number
) -> None:
    asked = number()
    decoupled.say(ToWorker.CANCEL, asked)
    decoupled.ping()
    code = "requests[0].get_response_sender().send(texts(repr(requests[0].is_cancelled())), 1)"
    probe(decoupled, asked, code)
    assert b"True" in bytes(decoupled.hear(ToGateway.RESPONSE).body)


@pytest.mark.parametrize("freed", ["go_on", "cancel", "forget"])
async def test_a_sender_in_an_event_loop_can_wait_for_room(freed: str) -> None:
    connection: Any = None
    opened = OpenRequests(connection, "m", decoupled=True)
    request = opened.add(1, ())
    sender = InferenceResponseSender(request)
    async with asyncio.timeout(20):
        await sender.room()
        opened.hold([1])
        waiting = asyncio.create_task(sender.room())
        await settle()
        assert not waiting.done()
        numbers = 1 if freed == "forget" else [1]
        threading.Thread(target=getattr(opened, freed), args=(numbers,)).start()
        await waiting
    request.close()
