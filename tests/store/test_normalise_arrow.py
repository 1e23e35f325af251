"""The column form gives the keys that the scalar form gives, to the byte."""

# ruff: noqa: RUF001  the look-alikes are the point
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store.normalise import LONGEST_TEXT, key_of

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: the [parquet] extra")
from store.normalise_arrow import keys_of  # noqa: E402  only where pyarrow is

NASTY = [
    "", " ", "?", "!", " ?! ", "what is ?", "what is !", "yes!!!", "5!", "what is 5!!?", "x!?", "it's me!",
    "!!x!!", "What is C++?", "is 5 > 3?", "a" * 511, "a" * 512, "é" * 256, "nul\0byte", "\u200b", "\u200bx",
    "x" * (LONGEST_TEXT + 1), " " * (LONGEST_TEXT + 1), "Cafe\u0301", "\u0301", "\u1112\u1161\u11ab",
    "ＷＨＡＴ？", "ß", "\ufb01n", "10²", "👍🏽?", "的？", "\u2028x\u2029", "ᾳ\u0301", "\U0001d400", "\ufdfa",
    "a\u0300\u0327b", "क्षि?", "𝟘!", "tab\tend\n",
]  # fmt: skip
texts = st.lists(
    st.one_of(
        st.none(),
        st.sampled_from(NASTY),
        st.text(st.sampled_from("aZ9 \t!?.…！'-+$é\u0301\u0327가\u1100\u1161\u11a8\u200bß"), max_size=8),
        st.text(st.characters(codec="utf-8"), max_size=6),
    ),
    max_size=12,
)


def expected(values):
    return [None if value is None else key_of(value) for value in values]


@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_a_nasty_text_alone(text):
    assert keys_of(pa.array([text])).to_pylist() == [key_of(text)]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts)
def test_any_column(values):
    assert keys_of(pa.array(values, pa.string())).to_pylist() == expected(values)


def test_slices_and_chunks():
    values = [random.Random(i).choice(NASTY) for i in range(60)]
    column = pa.chunked_array([pa.array(values[:20]), pa.array(values[20:])]).slice(7, 40)
    assert keys_of(column).to_pylist() == expected(values[7:47])


def test_an_empty_column():
    assert keys_of(pa.array([], pa.string())).to_pylist() == []
