"""A person chats with a model on the page: in a real browser, by mouse and by keyboard."""

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.gateway.frontends.http.playground.conftest import SIZE, Person, in_each_look
from tests.serving import Serving

pytestmark = pytest.mark.browser

TALE = "Once upon a time a sluice let the water through, drop by drop, and none had to wait. "
IN_FLIGHT = "gateway_requests_in_flight"
CANCELED = "nv_inference_request_failure"


@pytest.fixture
def chat(person: Person) -> Person:
    """A person before the chat."""
    return talk_to(person, "storyteller")


def talk_to(person: Person, model: str) -> Person:
    """Choose the model of the chat."""
    page = person.look_at("chat").page
    folded = page.locator(".settings summary")
    if folded.is_visible():
        folded.click()
    page.select_option("#chat-model", label=model)
    if folded.is_visible():
        folded.click()
    page.locator("#question").focus()
    return person


def ask(person: Person, text: str) -> Locator:
    """Type a message and send it; the answer, as it comes."""
    person.page.fill("#question", text)
    person.page.keyboard.press("Enter")
    return person.page.locator(".turn.assistant").last


def ended(answer: Locator) -> Locator:
    """Wait until an answer has come to its end."""
    expect(answer).not_to_have_class(re.compile("coming"))
    return answer


def test_an_answer_streams_and_its_speed_is_shown(chat: Person, tmp_path: Path) -> None:
    rest = tmp_path / "rest"
    answer = ask(chat, f"tell a story, with a pause until there is {rest}")
    expect(answer.locator(".body")).to_contain_text("Once upon")
    expect(chat.page.locator("#log")).to_have_attribute("aria-busy", "true")
    expect(chat.page.locator("#stop")).to_be_visible()
    rest.touch()
    expect(ended(answer).locator(".body")).to_have_text(TALE.strip())
    speed = answer.locator(".speed")
    expect(speed).to_have_text(
        re.compile(r"^first token after [\d.]+ m?s · [\d.]+ pieces/s · 18 pieces$")
    )
    expect(chat.page.locator("#log")).to_have_attribute("aria-busy", "false")
    expect(chat.page.locator("#stop")).to_be_hidden()
    expect(chat.page.locator("#question")).to_be_focused()
    for of_keys in ("#view-key", "#forget"):
        expect(chat.page.locator(of_keys)).to_be_hidden()


@pytest.mark.parametrize("model", ["counting_tokens", "openai_python"])
def test_a_bar_has_the_parts_of_the_time_of_an_answer(person: Person, model: str) -> None:
    answer = ended(ask(talk_to(person, model), "go on"))
    bar = answer.locator(".receipt")
    expect(bar).to_have_attribute("aria-label", re.compile(r"^[\d.]+ m?s in the server: .*infer"))
    expect(bar.locator(".share.model")).to_have_count(1)
    expect(bar.locator(".part").last).to_be_in_viewport()


LEGEND_HEIGHTS = """async () => {
  const { receiptBar } = await import("/playground/receipt.js");
  return ["queue", "prefill", "generate", "encode"].map((name) => {
    const bar = receiptBar({ [name]: 5, total: 5 });
    document.body.append(bar);
    return bar.querySelector("p").getBoundingClientRect().height;
  });
}"""


def test_each_part_in_the_legend_of_a_bar_is_one_line(person: Person) -> None:
    heights = person.look_at("chat").page.evaluate(LEGEND_HEIGHTS)
    assert len(set(heights)) == 1, heights


def test_tokens_are_counted_where_the_model_counts_them(person: Person) -> None:
    answer = ended(ask(talk_to(person, "counting_tokens"), "go on"))
    expect(answer.locator(".body")).to_have_text("one two three")
    expect(answer.locator(".speed")).to_have_text(
        re.compile(r"· [\d.]+ tokens/s · 9 tokens · ended at its longest$")
    )


def test_a_model_that_takes_openai_s_requests_is_talked_to_by_them(person: Person) -> None:
    answer = ended(ask(talk_to(person, "openai_python"), "say it again"))
    expect(answer.locator(".body")).to_have_text("say it again")
    expect(answer.locator(".speed")).to_have_text(re.compile(r"^first token after .* · 3 tokens$"))


def test_stopping_an_answer_stops_the_model(chat: Person, server: Serving) -> None:
    canceled = server.metric(CANCELED, "storyteller", reason="CANCELED")
    answer = ask(chat, "endless tale of a stop")
    expect(answer.locator(".body")).to_contain_text("word 3 ")
    chat.page.click("#stop")
    expect(answer.locator(".speed")).to_have_text(re.compile(r"pieces · stopped$"))
    server.wait_metric(IN_FLIGHT, "storyteller", 0)
    server.wait_metric(CANCELED, "storyteller", canceled + 1, reason="CANCELED")
    server.wait_logged("no more of 'endless tale of a stop'")
    expect(answer.locator(".body")).to_contain_text("word 0 word 1 word 2 word 3")


def test_leaving_the_page_stops_the_model(chat: Person, server: Serving) -> None:
    answer = ask(chat, "endless tale of a leaving")
    expect(answer.locator(".body")).to_contain_text("word 3 ")
    chat.page.goto("about:blank")
    server.wait_metric(IN_FLIGHT, "storyteller", 0)
    server.wait_logged("no more of 'endless tale of a leaving'")


def test_escape_stops_the_answer_and_keeps_its_beginning(chat: Person, server: Serving) -> None:
    answer = ask(chat, "endless")
    expect(answer.locator(".body")).to_contain_text("word 3 ")
    chat.page.keyboard.press("Escape")
    expect(answer.locator(".speed")).to_contain_text("stopped")
    server.wait_metric(IN_FLIGHT, "storyteller", 0)
    history = ended(ask(chat, "history")).locator(".body")
    expect(history).to_contain_text("user: endless | assistant: word 0 word 1")
    expect(history).to_contain_text("| user: history")


def test_the_whole_conversation_goes_to_the_model_behind_the_system_prompt(chat: Person) -> None:
    chat.page.fill("#system", "Be brief.")
    ended(ask(chat, "a story"))
    history = ended(ask(chat, "history")).locator(".body")
    said = f"system: Be brief. | user: a story | assistant: {TALE} | user: history"
    assert history.text_content() == said


def test_only_the_parameters_that_were_given_go_to_the_model(chat: Person) -> None:
    chat.page.fill("#max-tokens", "")
    first = ended(ask(chat, "parameters")).locator(".body")
    assert json.loads(first.text_content() or "") == {"stream": True}
    chat.page.fill("#max-tokens", "7")
    chat.page.fill("#temperature", "0.5")
    chat.page.fill("#top-p", "0.9")
    chat.page.fill("#seed", "42")
    second = ended(ask(chat, "parameters")).locator(".body")
    given = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 42}
    assert json.loads(second.text_content() or "") == {"stream": True, **given}


def test_parameters_go_into_the_input_for_them_where_the_model_has_it(person: Person) -> None:
    talk_to(person, "counting_tokens").page.fill("#temperature", "0.5")
    body = ended(ask(person, "sampling?")).locator(".body")
    assert json.loads(body.text_content() or "") == {"max_tokens": 512, "temperature": 0.5}


def test_markdown_becomes_elements_and_markup_stays_text(chat: Person) -> None:
    body = ended(ask(chat, "markdown")).locator(".body")
    expect(body.locator(".heading")).to_have_text("A heading")
    expect(body.locator("strong")).to_have_text("bold")
    expect(body.locator("em")).to_have_text("slanted")
    expect(body.locator("ul li")).to_have_text(["first", "second"])
    expect(body.locator("ol li")).to_have_text(["one", "two"])
    expect(body.locator("pre code")).to_have_text('print("<script>alert(1)</script>")')
    expect(body.locator("p").nth(1)).to_contain_text("but 2 * 3 * 4 and <b>no markup</b>.")
    expect(body.locator("b, script")).to_have_count(0)
    chat.picture("chat-markdown")


@pytest.mark.parametrize(
    ("asked", "said", "before"),
    [("fail", "the story is lost", ""), ("break off", "the page is torn", "Once upon")],
)
def test_an_error_of_the_model_is_shown_in_words_and_can_be_retried(
    chat: Person, asked: str, said: str, before: str
) -> None:
    answer = ended(ask(chat, asked))
    expect(answer.locator(".failure")).to_have_text(said)
    expect(answer.locator(".body")).to_have_text(before)
    chat.page.click("#retry")
    expect(chat.page.locator(".failure")).to_have_count(1)
    expect(chat.page.locator(".turn")).to_have_count(2)
    expect(chat.page.locator("#question")).to_be_focused()
    history = ended(ask(chat, "history")).locator(".body")
    expect(history).to_have_text("user: history")
    again = ended(ask(chat, "history")).locator(".body")
    expect(again).to_have_text("user: history | assistant: user: history | user: history")


def test_a_question_that_was_stopped_before_it_was_answered_is_left_out(
    chat: Person, server: Serving
) -> None:
    answer = ask(chat, "say nothing")
    server.wait_metric(IN_FLIGHT, "storyteller", 1)
    chat.page.keyboard.press("Escape")
    expect(ended(answer).locator(".speed")).to_have_text("stopped")
    server.wait_metric(IN_FLIGHT, "storyteller", 0)
    history = ended(ask(chat, "history")).locator(".body")
    expect(history).to_have_text("user: history")


def test_retry_asks_again_for_another_answer(chat: Person) -> None:
    ended(ask(chat, "history"))
    chat.page.click("#retry")
    answer = ended(chat.page.locator(".turn.assistant").last)
    expect(answer.locator(".body")).to_have_text("user: history")
    expect(chat.page.locator(".turn.assistant")).to_have_count(1)


def test_clear_forgets_the_conversation(chat: Person) -> None:
    ended(ask(chat, "a story"))
    chat.page.click("#clear")
    expect(chat.page.locator(".turn")).to_have_count(0)
    expect(chat.page.locator("#welcome")).to_be_visible()
    expect(chat.page.locator("#clear")).to_be_disabled()
    answer = ended(ask(chat, "history"))
    expect(answer.locator(".body")).to_have_text("user: history")


def test_an_answer_can_be_copied_as_the_model_wrote_it(chat: Person) -> None:
    chat.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer = ended(ask(chat, "markdown"))
    answer.get_by_role("button", name="Copy").last.click()
    expect(answer.get_by_role("button", name="Copied")).to_be_visible()
    copied = chat.page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("# A heading\n\nSome **bold** words")


def test_a_conversation_needs_no_mouse(chat: Person) -> None:
    page = chat.page
    page.locator(".brand").click()
    seen = []
    for _ in range(14):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.hash"))
        if seen[-1] == "question":
            break
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert css(page, "#composer", "borderTopColor") == css(page, "nav a[aria-current]", "color")
    assert seen == [
        *("#chat", "#tensors", "#state"),
        *("chat-model", "system", "max-tokens", "temperature", "top-p", "seed", "log", "question"),
    ]
    page.keyboard.type("two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    expect(page.locator("#question")).to_have_value("two\nlines")
    page.keyboard.press("Enter")
    ended(page.locator(".turn.assistant").last)
    assert page.locator(".turn.user .body").text_content() == "two\nlines"
    page.keyboard.type("endless")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant").last).to_contain_text("word 2 ")
    page.keyboard.press("Escape")
    ended(page.locator(".turn.assistant").last)
    expect(page.locator("#question")).to_be_focused()


def test_an_empty_message_is_not_sent(chat: Person) -> None:
    expect(chat.page.locator("#send")).to_be_disabled()
    chat.page.fill("#question", "  \n ")
    chat.page.keyboard.press("Enter")
    expect(chat.page.locator("#send")).to_be_disabled()
    expect(chat.page.locator(".turn")).to_have_count(0)


@in_each_look
def test_the_chat_is_readable_in_light_and_dark_wide_and_narrow(
    browser: Browser, server: Serving, scheme: str, width: int
) -> None:
    size = {**SIZE, "width": width}
    context = browser.new_context(viewport=size, color_scheme=scheme)
    chat = talk_to(Person(context.new_page(), server.http), "storyteller")
    chat.picture(f"chat-empty-{scheme}-{width}")
    ended(ask(chat, "a story"))
    answer = ask(chat, "endless")
    expect(answer.locator(".body")).to_contain_text("word 30 ")
    chat.picture(f"chat-{scheme}-{width}")
    assert contrast(chat.page, ".turn.assistant .body") > 7
    assert contrast(chat.page, ".meta") > 4.5
    assert contrast(chat.page, "nav a[aria-current]") > 4.5
    assert fits(chat.page)
    for seen in (".bar", "#question", "#stop"):
        expect(chat.page.locator(seen)).to_be_in_viewport(ratio=1)
    context.close()
    assert chat.complaints == []


def fits(page: Page) -> bool:
    """Whether nothing is wider than the window."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def css(page: Page, selector: str, name: str) -> str:
    """A property as the browser has computed it."""
    script = "(element, name) => getComputedStyle(element)[name]"
    return str(page.locator(selector).evaluate(script, name))


def contrast(page: Page, selector: str) -> float:
    """The contrast of text with its background (WCAG's ratio)."""
    script = """element => {
      const colour = (each, name) => getComputedStyle(each)[name].match(/[\\d.]+/g).map(Number);
      const light = ([r, g, b]) => [r, g, b].map((c) => c / 255).map((c) =>
        c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4
      ).reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
      let behind = element;
      while (colour(behind, "backgroundColor")[3] === 0) behind = behind.parentElement;
      const pair = [light(colour(element, "color")), light(colour(behind, "backgroundColor"))];
      return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    }"""
    return float(page.locator(selector).last.evaluate(script))
