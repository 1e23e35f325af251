"""The bounded patterns mean what the same regular expressions mean."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import safety_policy
from actors.safety_pattern import PatternError, literal, parse
from actors.safety_scan import all_matches, first_match

ATOMS = st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", "\\d", "\\w", "1", "[b-d1]"])


def grouped(inner):
    sequence = st.lists(inner, min_size=1, max_size=3).map("".join)
    either = st.lists(sequence, min_size=1, max_size=3).map("|".join).map("({})".format)
    repeated = st.tuples(either | inner, st.sampled_from(["?", "{2}", "{1,3}", "{0,2}"])).map(
        lambda pair: f"(?:{pair[0]}){pair[1]}"
    )
    return sequence | either | repeated


PATTERNS = st.recursive(ATOMS, grouped, max_leaves=8)


def rules(pattern: str):
    """One rule with this pattern between two letters, so that it is neither empty nor led by a space."""
    toml = f"""name = "x"
[[rule]]
id = "r"
category = "hate"
word = false
max_length = 1000
patterns = ['x(?:{pattern})y']"""
    return safety_policy.read(toml).every


@given(PATTERNS, st.lists(st.sampled_from(["a", "b", "c", "d", "1", "x", "y", "_", "-"]), max_size=12))
def test_a_pattern_matches_what_the_regular_expression_matches(pattern, letters):
    text = "".join(letters)
    compiled = rules(pattern)
    expected = re.search(f"x(?:{pattern})y", text) is not None
    assert any(True for _ in all_matches(compiled, text)) == expected
    for cut in range(len(text)):
        found = first_match(compiled, text[:cut], "", final=False)
        if isinstance(found, int):
            found = first_match(compiled, text[found:], text[:found], final=True)
        assert (not isinstance(found, int)) == expected


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("a*", "no bound"),
        ("a+", "no bound"),
        ("a{2,}", "no bounded repeat"),
        ("a{3,2}", "must rise"),
        ("a{0}", "zero times"),
        ("a{9999}", "must rise"),
        ("(?=a)b", "groups"),
        ("(?P<n>a)", "groups"),
        ("(a", "not closed"),
        ("a)", "without an opening"),
        ("[a", "too early"),
        ("[]", "empty class"),
        ("[b-a]", "falls"),
        ("\\1", "not known"),
        ("\\b", "not known"),
        ("^a", "stands for itself"),
        ("a$", "stands for itself"),
        ("{1}", "stands for itself"),
        ("", "empty text"),
        (".a", "begin with a space"),
        ("a\u200b", "no shadow"),
        ("(a{60}){60}{60}", "stands for itself|at most"),
        ("((a{60}){60}){60}", "at most"),
    ],
)
def test_what_cannot_be_bounded_or_understood_is_refused(pattern, complaint):
    with pytest.raises(PatternError, match=complaint):
        parse(pattern)


def test_the_longest_match_is_known():
    assert parse("a(?:bc|d){2,4}e?").longest == 10
    assert literal("Straße").longest == 7
