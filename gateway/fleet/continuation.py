"""Continuation of a text whose replica was lost: its request, and the joint of its responses.

The request for the rest has the text so far behind its prompt. Tokens at the joint may be cut in
another way: the rest is as likely as the lost one, and not always the same. No I/O is done here.
"""

from collections.abc import Sequence
from dataclasses import replace

from gateway.errors import Code, InferenceError
from gateway.fleet.continuable import NotContinued
from gateway.fleet.text_forms import CONTINUED, Joined, TextForm, form_of
from gateway.messages import InferRequest, InferResponse


class SentText:
    """The text that the responses to a request have so far.

    `tokens` is the number of its tokens, `continued` that of its continuations. It `is_complete`
    after its last response.
    """

    def __init__(self, request: InferRequest) -> None:
        self.tokens = self.continued = 0
        self.is_complete = False
        self._form: TextForm | None = None
        self._refusal = ""
        self._text = bytearray()
        self._chars = self._prompt_tokens = self._tokens_before = self._unreported = 0
        try:
            self._form = form_of(request)
        except (NotContinued, InferenceError) as error:
            self._refuse(error)

    def take(self, response: InferResponse) -> Joined:
        """The next response for the client; None if it gets none. InferenceError: no text."""
        self.is_complete = self.is_complete or response.final
        usage, form = response.usage, self._form
        if usage is not None:
            self.tokens += usage.completion_tokens
            if not self.continued:
                self._prompt_tokens += usage.prompt_tokens
        if form is None:
            return response
        try:
            self._add(*form.read(response))
            return self._joined(form, response) if self.continued else response
        except NotContinued as error:
            self._refuse(error)
        if not self.continued:
            return response
        raise InferenceError(Code.UNAVAILABLE, f"{self.account}; its continuation is no text")

    def take_texts(self, name: str, texts: Sequence[bytes], tokens: Sequence[int | None]) -> None:
        """As `take` of the `response_of_text` of each, in a text that is not continued yet."""
        self.tokens += sum(filter(None, tokens))
        form = self._form
        if form is None or name != form.output:
            return
        try:
            for each in texts:
                self._add(*form.read_element(each))
        except NotContinued as error:
            self._refuse(error)

    def rest(self) -> InferRequest:
        """The request for the rest, whose responses follow; raises NotContinued."""
        if self._form is None:
            raise NotContinued(self._refusal)
        if self._chars and not self.tokens:
            raise NotContinued("its responses have no numbers of tokens")
        request = self._form.rest(self._text.decode(), self.tokens)
        self.continued += 1
        self._tokens_before = self.tokens
        due = request.deadline
        if due is None:
            return request
        # The first response has come.
        due = replace(due, first_ns=0, held_first_ns=0, slo_first_ns=0)
        return replace(request, deadline=due)

    @property
    def account(self) -> str:
        """The number of tokens that were sent; of characters, if those are not known."""
        if self._chars and not self.tokens:
            return f"{self._chars} characters were sent"
        return f"{self.tokens} tokens were sent"

    def _add(self, text: str, is_last: bool) -> None:
        self.is_complete = self.is_complete or is_last
        self._text += text.encode()
        self._chars += len(text)

    def _refuse(self, error: Exception) -> None:
        self._form, self._refusal, self._text = None, str(error), bytearray()

    def _joined(self, form: TextForm, response: InferResponse) -> Joined:
        joined = form.join(response, self._prompt_tokens, self._tokens_before, self.continued)
        if response.usage is not None:
            self._unreported += response.usage.completion_tokens
        if joined is None:
            return None
        parameters = response.parameters
        if response.final:
            parameters = {**parameters, CONTINUED: self.continued}
        usage = response.usage
        if usage is not None:
            usage = replace(usage, prompt_tokens=0, completion_tokens=self._unreported)
            self._unreported = 0
        return replace(joined, parameters=parameters, usage=usage)
