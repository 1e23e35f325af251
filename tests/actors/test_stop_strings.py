from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.stop_strings import StopStrings


def run(stops: tuple[str, ...], pieces: list[str], *, include_stop: bool = False) -> tuple[str, bool]:
    watch = StopStrings(stops, include_stop)
    text = "".join(watch.push(piece) for piece in pieces)
    return text + watch.finish(), watch.matched


def test_a_stop_string_spread_over_tokens_leaks_nothing() -> None:
    watch = StopStrings(("DEFGHIJ",))
    assert [watch.push(piece) for piece in ("abcD", "EF", "GHI", "Jk")] == ["abc", "", "", ""]
    assert watch.matched
    assert watch.push("more") == ""
    assert watch.finish() == ""


def test_only_what_can_still_match_is_held_back() -> None:
    watch = StopStrings(("aab",))
    assert watch.push("aaa") == "a"
    assert watch.push("c") == "aac"
    assert watch.finish() == ""


def test_text_that_was_held_back_comes_at_the_end() -> None:
    assert run(("STOP",), ["go ST"]) == ("go ST", False)


def test_the_stop_string_stays_when_asked_for() -> None:
    assert run(("END",), ["the E", "ND of"], include_stop=True) == ("the END", True)


def test_of_two_that_match_the_one_that_ends_first_wins() -> None:
    assert run(("bcd", "c"), ["abcd"]) == ("ab", True)
    assert run(("bc", "c"), ["abcd"]) == ("a", True)


@given(
    st.text("ab", max_size=24),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 24), max_size=6),
    st.booleans(),
)
def test_the_result_does_not_depend_on_where_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include_stop: bool
) -> None:
    at = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    pieces = [text[a:b] for a, b in pairwise(at)]
    whole = run(tuple(stops), [text], include_stop=include_stop)
    assert run(tuple(stops), pieces, include_stop=include_stop) == whole
    assert text.startswith(whole[0])
    if not include_stop:
        assert not any(stop in whole[0] for stop in stops)


@pytest.mark.parametrize("cut", range(8))
def test_nothing_of_a_match_goes_out_however_it_is_cut(cut: int) -> None:
    stop = "DEFGHIJ"
    watch = StopStrings((stop,))
    assert watch.push("x" + stop[:cut]) + watch.push(stop[cut:] + "y") == "x"
