"""Texts of failures, made of those that obstore's errors have."""

import pytest

from gateway.storage.remote.failures import code_of, explained


class GenericError(Exception):
    """Named as obstore's."""


REQUEST = "Error performing GET http://host:9000/b?sig=SECRET in 52ms, after 1 retries"
SOURCE = "\n\nDebug source:\nGeneric {{ uri: http://host:9000/b?sig=SECRET, {0} }}"
STATUS = f"{REQUEST} - Server returned non-2xx status code: "


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (
            f"{STATUS}404 Not Found: <Error><Code>NoSuchBucket</Code>"
            "<Message>It is missing.\nRequestId: 1</Message></Error>",
            "NoSuchBucket",
            "404 NoSuchBucket: It is missing; create it, or correct the address",
        ),
        (f"{STATUS}418 Teapot: SECRET", "418", "418"),
        (
            f"{REQUEST} - HTTP error: error sending request" + SOURCE.format("kind: Connect"),
            "CannotConnect",
            "CannotConnect; check that the storage runs, and its endpoint in the address",
        ),
        (
            f"{REQUEST} - HTTP error: error sending request"
            + SOURCE.format('kind: Connect, "dns error"'),
            "HostNotFound",
            "HostNotFound; check the host in the address, and DNS",
        ),
        (
            f"{REQUEST} - HTTP error: request or response body error"
            + SOURCE.format("kind: Decode"),
            "Interrupted",
            "Interrupted; try again later, or with fewer requests at once",
        ),
        (
            "invalid type: string \"SECRET\", expected 'SECRET' at http://host/SECRET for a map.",
            "Generic",
            "Generic: invalid type: string ..., expected ... at ... for a map",
        ),
        (
            "Unable to open file /home/SECRET/key.json: no such file",
            "Generic",
            "Generic: Unable to open file ... no such file",
        ),
    ],
)
def test_a_failure_has_status_code_message_and_fix_but_no_url_and_no_value(
    text: str, code: str, words: str
) -> None:
    error = GenericError(text)
    assert code_of(error) == code
    assert explained("list 's3://b'", error) == f"cannot list 's3://b': {words}"
