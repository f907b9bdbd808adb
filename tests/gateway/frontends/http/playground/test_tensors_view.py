"""A person fills in the form that the page makes of a model's metadata."""

import re
import shlex
import subprocess
from collections.abc import Sequence

import pytest
from playwright.sync_api import Browser, Locator, Route, expect

from tests.gateway.frontends.http.playground.conftest import ODD_NAME, SIZE, Person
from tests.serving import Serving

pytestmark = pytest.mark.browser

ANSWERED = re.compile(r"^(Answered|\d+ responses) in [\d.]+ m?s$")
LATE_MS = 600
"""After this time an answer of the model `slow`, or of a late request, is there."""
WAIT_MS = 10
"""Between two looks for a request of the page."""


@pytest.fixture
def form(person: Person) -> Person:
    """A person before the form."""
    return person.look_at("tensors")


def choose(person: Person, model: str, *values: str) -> None:
    """Choose a model, and fill in its inputs in their order."""
    person.page.select_option("#tensor-model", label=model)
    fields = person.page.locator("#inputs textarea")
    fields.first.wait_for()
    for index, value in enumerate(values):
        fields.nth(index).fill(value)


def infer(person: Person, model: str, *values: str) -> Locator:
    """The outputs that a model answers."""
    choose(person, model, *values)
    person.page.click("#infer")
    expect(person.page.locator("#infer-status")).to_have_text(ANSWERED)
    return person.page.locator("#outputs .output")


def refused(person: Person, model: str, *values: str) -> str:
    """The error when a model cannot be asked so."""
    choose(person, model, *values)
    person.page.click("#infer")
    failure = person.page.locator("#infer-status.failure")
    failure.wait_for()
    expect(person.page.locator("#answer")).to_be_hidden()
    return plain(failure.text_content() or "")


def plain(text: str) -> str:
    """The same text with a letter for the sign between dimensions."""
    return text.replace("\N{MULTIPLICATION SIGN}", "x")


def shown(output: Locator) -> tuple[str | None, Sequence[str], str | None]:
    """Name, datatype and shape, and the values."""
    tags = [plain(tag) for tag in output.locator(".about .tag").all_text_contents()]
    return output.locator(".name").text_content(), tags, output.locator("pre").text_content()


def test_a_form_infers_and_shows_what_the_model_computes(form: Person) -> None:
    outputs = infer(form, "add_sub", "1 2, 3\n4", "[0.5, 1, 1.5, 20]")
    expect(outputs).to_have_count(2)
    assert shown(outputs.nth(0)) == ("OUTPUT0", ["FP32", "4"], "1.5  3  4.5  24")
    assert shown(outputs.nth(1)) == ("OUTPUT1", ["FP32", "4"], "0.5  1  1.5  -16")
    facts = outputs.nth(0).locator(".facts")
    expect(facts).to_have_text("norm 24.6 · argmax 3 · from 1.5 to 24")


def test_the_curl_command_gives_the_same_answer(form: Person) -> None:
    form.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    infer(form, "texts", 'it\'s one\ntwo "quoted"')
    form.page.click("#copy-curl")
    expect(form.page.locator("#copy-curl")).to_have_text("Copied")
    copied = form.page.evaluate("navigator.clipboard.readText()")
    assert copied == form.page.locator("#curl").text_content()
    arguments = shlex.split(copied)
    assert arguments[:2] == ["curl", "-s"]
    answer = subprocess.run(arguments, capture_output=True, text=True, timeout=20, check=True)
    assert '"data":["it\'s one","two \\"quoted\\""]' in answer.stdout


@pytest.mark.parametrize(
    ("typed", "dims", "shape", "values"),
    [
        ("1 2 3 4 5 6", (), "1 x 6", "1  2  3  4  5  6"),
        ("[[1, 2], [3, 4], [5, 6]]", (), "3 x 2", "1  2  3  4  5  6"),
        ("1 2 3 4 5 6", ("2", ""), "2 x 3", "1  2  3  4  5  6"),
        ("1 2 3 4 5 6", ("", "2"), "3 x 2", "1  2  3  4  5  6"),
        ("1e-3 -2.5 1e10", (), "1 x 3", "0.001  -2.5  10000000000"),
        ("nan inf -Infinity", (), "1 x 3", "NaN\nInfinity\n-Infinity"),
        ("", (), "1 x 0", ""),
    ],
)
def test_free_dimensions_follow_from_the_values_or_are_chosen(
    form: Person, typed: str, dims: Sequence[str], shape: str, values: str
) -> None:
    choose(form, "matrix", typed)
    for index, dim in enumerate(dims):
        form.page.locator(".dims input").nth(index).fill(dim)
    form.page.click("#infer")
    expect(form.page.locator("#answer")).to_be_visible()
    assert shown(form.page.locator("#outputs .output")) == ("OUTPUT", ["FP32", shape], values)


def test_values_can_be_generated_for_large_tensors(form: Person) -> None:
    choose(form, "matrix")
    form.page.locator(".dims input").nth(0).fill("3")
    form.page.locator(".dims input").nth(1).fill("100")
    for kind, facts in (
        ("zeros", "norm 0 · argmax 0 · from 0 to 0"),
        ("ones", "norm 10 · argmax 0 · from 1 to 1"),
        ("counting", "norm 573 · argmax 99 · from 0 to 99"),
    ):
        form.page.select_option("#source-0", label=kind)
        form.page.click("#infer")
        rows = form.page.locator("#outputs .facts")
        expect(rows.first).to_have_text(f"row 0: {facts}")
        expect(rows).to_have_count(3)
    expect(form.page.locator("#outputs pre")).to_contain_text("and 252 more")


def test_whole_numbers_keep_every_digit(form: Person) -> None:
    outputs = infer(form, "optional", "9223372036854775807 -9007199254740993")
    assert shown(outputs) == ("X", ["INT64", "2"], "9223372036854775807  -9007199254740993")


def test_an_optional_input_may_be_left_out_or_given(form: Person) -> None:
    choose(form, "optional")
    expect(form.page.locator("#inputs legend .tag")).to_have_text("optional")
    outputs = infer(form, "optional", "1 2", "true 0 FALSE")
    expect(outputs).to_have_count(2)
    assert shown(outputs.nth(1)) == ("Y", ["BOOL", "3"], "true  false  false")


def test_texts_are_lines_or_a_list(form: Person) -> None:
    assert shown(infer(form, "texts", "one\n\nthree")) == ("OUTPUT", ["BYTES", "3"], "one\n\nthree")
    listed = infer(form, "texts", '["<b>bold</b>", "two\\nlines"]')
    assert shown(listed) == ("OUTPUT", ["BYTES", "2"], "<b>bold</b>\ntwo\nlines")
    expect(listed.locator("b")).to_have_count(0)


def test_a_batch_dimension_is_free(form: Person) -> None:
    row = " ".join(str(number) for number in range(16))
    outputs = infer(form, "batched", f"{row}\n{row}")
    assert shown(outputs)[1] == ["FP32", "2 x 16"]
    expect(form.page.locator(".dims input")).to_have_attribute("placeholder", "batch")


@pytest.mark.parametrize(
    ("model", "values", "said"),
    [
        ("add_sub", ("1 2 3", "1 2 3 4"), "Input INPUT0: 3 values do not fill the shape 4."),
        ("add_sub", ("1 2 3 4", "a b c d"), "Input INPUT1: 'a' is no number, as FP32 needs."),
        ("optional", ("1 2.5",), "Input A: '2.5' is no whole number, as INT64 needs."),
        ("optional", ("1 2", "maybe"), "Input B: 'maybe' is neither true nor false."),
        ("batched", ("1 2 3",), "Input INPUT: 3 values do not fill the shape any x 16."),
    ],
)
def test_an_invalid_value_is_shown_before_it_is_sent(
    form: Person, model: str, values: Sequence[str], said: str
) -> None:
    assert refused(form, model, *values) == said


@pytest.mark.parametrize(
    ("model", "values", "said"),
    [
        ("failing", ("x",), "the model says no"),
        ("add_sub", ("-1 2 3 4", "1 2 3 4"), "negative"),
    ],
)
def test_an_error_of_the_server_is_shown_in_words(
    form: Person, model: str, values: Sequence[str], said: str
) -> None:
    assert said in refused(form, model, *values)
    assert shown(infer(form, "texts", "and on"))[2] == "and on"


def test_a_model_with_an_odd_name_is_asked_under_its_own_name(form: Person) -> None:
    assert shown(infer(form, ODD_NAME, "7 -8")) == ("OUTPUT", ["INT32", "2"], "7  -8")


def test_a_version_can_be_chosen_where_several_are_ready(form: Person) -> None:
    options = form.page.locator("#tensor-model option").all_text_contents()
    assert [each for each in options if each.startswith("versioned")] == [
        *("versioned", "versioned, version 1", "versioned, version 3")
    ]
    infer(form, "versioned, version 1", "5")
    expect(form.page.locator("#curl")).to_contain_text("/v2/models/versioned/versions/1/infer")


def test_a_decoupled_model_shows_each_of_its_responses(form: Person) -> None:
    choose(form, "repeat")
    inputs = form.page.locator("#inputs .name").all_text_contents()
    values = {"text_input": "again", "n": "3", "delay_us": "0"}
    for index, name in enumerate(inputs):
        form.page.locator("#inputs textarea").nth(index).fill(values.get(name, ""))
    form.page.click("#infer")
    expect(form.page.locator("#infer-status")).to_have_text(ANSWERED)
    first = form.page.locator("#outputs .output").first
    expect(first.locator(".tag")).to_have_text("response 1")
    expect(first.locator("pre")).to_contain_text("again")
    expect(form.page.locator("#curl")).to_contain_text("curl -N")


def test_the_form_needs_no_mouse(form: Person) -> None:
    page = form.page
    page.locator("#tensor-model").focus()
    page.keyboard.type("add")
    page.locator("#inputs legend", has_text="INPUT1").wait_for()
    focused = "document.activeElement.id"
    for field, value in (("input-0", "1 1 1 1"), ("input-1", "2 2 2 2")):
        while page.evaluate(focused) != field:
            page.keyboard.press("Tab")
        page.keyboard.type(value)
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "infer"
    page.keyboard.press("Enter")
    assert shown(page.locator("#outputs .output").first)[2] == "3  3  3  3"


def test_a_late_description_leaves_what_has_been_typed(form: Person) -> None:
    page, late = form.page, list[Route]()
    choose(form, "matrix")
    page.route(
        "**/v2/models/texts", lambda route: route.continue_() if late else late.append(route)
    )
    page.select_option("#tensor-model", label="texts")
    while not late:
        page.wait_for_timeout(WAIT_MS)
    for model in ("matrix", "texts"):
        page.select_option("#tensor-model", label=model)
    page.locator("#inputs legend", has_text="INPUT").wait_for()
    page.locator("#inputs textarea").fill("typed")
    late[0].continue_()
    page.wait_for_timeout(LATE_MS)
    assert page.locator("#inputs textarea").input_value() == "typed"


def test_an_answer_to_another_model_is_not_shown(form: Person) -> None:
    page, late = form.page, list[Route]()
    page.route("**/v2/models/slow/infer", lambda route: late.append(route))
    choose(form, "slow", "x")
    page.click("#infer")
    while not late:
        page.wait_for_timeout(WAIT_MS)
    expect(page.locator("#infer")).to_be_disabled()
    choose(form, "texts")
    expect(page.locator("#infer")).to_be_enabled()
    late[0].continue_()
    page.wait_for_timeout(LATE_MS)
    expect(page.locator("#answer")).to_be_hidden()
    assert shown(infer(form, "texts", "and on"))[2] == "and on"


def test_an_unloaded_model_is_removed_from_the_form(form: Person, server: Serving) -> None:
    page = form.page
    listed = page.locator("#tensor-model option", has_text="slow")
    expect(listed).to_have_count(1)
    page.request.post(f"{server.http}/v2/repository/models/slow/unload", data="{}")
    expect(listed).to_have_count(0)
    page.request.post(f"{server.http}/v2/repository/models/slow/load", data="{}")
    expect(listed).to_have_count(1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_form_fits_in_light_and_dark_wide_and_narrow(
    browser: Browser, server: Serving, scheme: str, width: int
) -> None:
    size = {**SIZE, "width": width}
    context = browser.new_context(viewport=size, color_scheme=scheme)
    form = Person(context.new_page(), server.http).look_at("tensors")
    infer(form, "add_sub", "1 2 3 4", "4 3 2 1")
    assert form.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    form.page.set_viewport_size({"width": width, "height": 1500})
    form.picture(f"tensors-{scheme}-{width}")
    context.close()
    assert form.complaints == []
