"""One choice's text, as a state machine: what is asked of the checker, and what a verdict lets out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.protocol import Allow, Screen, TokenLogprob
from actors.scripted_engine import BytesText
from actors.stop_strings import StopStrings
from actors.turn_text import ChoiceText


def choice(*stops: str) -> ChoiceText:
    model = BytesText()
    return ChoiceText("r", 0, model.detokenizer(), StopStrings(stops), model.token_bytes)


def allow(end: int) -> Allow:
    return Allow("r", "output", 0, end, "safety.0", "p")


def test_a_question_brings_what_has_no_verdict_and_what_stands_before_it() -> None:
    text = choice()
    text.push(b"abcdef", (), "")
    assert text.next_screen() == Screen("r", "output", 0, 0, "abcdef", "", final=False)
    assert text.next_screen() is None
    delta = text.release(allow(4))
    assert delta is not None
    assert (delta.start, delta.text) == (0, "abcd")
    assert text.next_screen() is None
    text.push(b"g", (), "")
    assert text.next_screen() == Screen("r", "output", 0, 4, "efg", "abcd", final=False)


def test_the_end_is_asked_about_even_when_nothing_new_came() -> None:
    text = choice()
    text.push(b"abc", (), "")
    text.next_screen()
    text.push(b"", (), "stop")
    assert text.next_screen() == Screen("r", "output", 0, 0, "abc", "", final=True)
    text.release(allow(3))
    assert text.is_out


def test_the_context_is_the_last_sixty_four_characters() -> None:
    text = choice()
    text.push(b"x" * 100 + b"y", (), "")
    text.release(allow(100))
    assert text.screen_until(101, final=False).context == "x" * 64


def test_a_verdict_past_the_text_lets_out_no_more_than_there_is() -> None:
    text = choice()
    text.push(b"abc", (), "")
    delta = text.release(allow(10))
    assert delta is not None
    assert delta.text == "abc"
    assert text.release(allow(10)) is None


def test_a_token_with_half_a_character_goes_with_the_whole_one() -> None:
    text = choice()
    for byte in "aé".encode():
        text.push((byte,), (TokenLogprob(byte, -1.0),), "")
    first, second = text.release(allow(1)), text.release(allow(2))
    assert first is not None
    assert second is not None
    assert [lp.token for lp in first.logprobs] == [b"a"]
    assert [lp.token for lp in second.logprobs] == [b"\xc3", b"\xa9"]


def test_tokens_of_a_stop_string_carry_nothing_out() -> None:
    text = choice("END")
    for byte in b"okEND":
        text.push((byte,), (TokenLogprob(byte, -1.0),), "")
    assert (text.text, text.finish) == ("ok", "stop")
    delta = text.release(allow(2))
    assert delta is not None
    assert [lp.token for lp in delta.logprobs] == [b"o", b"k"]


@given(st.text(max_size=40), st.lists(st.integers(1, 5), max_size=60), st.integers(0, 40))
def test_gone_on_with_after_a_restart_it_says_the_rest_and_nothing_twice(
    said: str, cuts: list[int], released: int
) -> None:
    data = said.encode()
    first = choice()
    at = 0
    for cut in cuts:
        first.push(tuple(data[at : at + cut]), (), "")
        at += cut
    first.push(tuple(data[at:]), (), "stop")
    out = first.release(allow(min(released, len(first.text))))
    second = choice()
    second.push(tuple(data), (), "stop")
    second.skip(first.released)
    rest = second.release(allow(len(said)))
    assert (out.text if out else "") + (rest.text if rest else "") == said
    assert second.is_out
