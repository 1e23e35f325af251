"""The normal form of a question: what it merges, what it keeps apart, and that it never moves."""

# ruff: noqa: RUF001  the look-alikes are the point
import hashlib
import string
import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store import normalise as module
from store.normalise import LONGEST_KEY, LONGEST_TEXT, NORMALISER, STOPS, fold, key_of, normalise

TABLED = {*module.FOLD, *module._DECOMPOSE, *module._COMBINING}
EVERY = [
    chr(c)
    for c in sorted({*TABLED, *range(0x3400), *range(0x3400, 0x110000, 97)})
    if not 0xD800 <= c <= 0xDFFF
]
"""Every code point that a table names, and enough of the others."""
KEPT = set("²³¹⁰ⁱ⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿ‘’“”‐‑")
TRICKY = (
    "aA éÉ ßẞ İı ſK ΣσςΑΙ\u0345ᾳ \u0301\u0300\u0327\u0323 \u1100\u1161\u11a8가각 ａＡ！？．ﬁ ½² ´¨ "
    "?!.… 'ʼ’“” +#-$>< 0123 \t\n\u00a0\u3000\u2028 \u200b\u200d\ufe0f\u00ad\u202e "
    "👍🏽 नमस्ते ক\u09be\u09c7 สวัสดี"
)
texts = st.text(st.one_of(st.sampled_from(sorted(set(TRICKY))), st.characters(codec="utf-8")), max_size=12)
calmly = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SAME = [
    ("What is quickselect?", "what is quickselect"),
    ("  WHAT\tis \n quickselect??! ", "what is quickselect"),
    ("ＷＨＡＴ　ｉｓ quickselect？", "what is quickselect"),
    ("what\u200b is\u202e quick\u00adselect\ufeff", "what is quickselect"),
    ("what’s “antiphon”?", 'what\'s "antiphon"'),
    ("Straße", "strasse"),
    ("Cafe\u0301", "café"),
    ("ΑΣ", "ας".casefold()),
    ("\u1112\u1161\u11ab\u1100\u1173\u11af", "한글"),
    ("快速选择是什么？", "快速选择是什么"),
    ("What is C++?", "what is c++"),
    ("yes!!!", "yes"),
    ("It's covid…", "it's covid"),
    ("is 5 > 3?", "is 5 > 3"),
]
APART = [
    ("what is C++", "what is C#"),
    ("what is C++", "what is C"),
    ("is 5 > 3?", "is 5 3"),
    ("is 5 > 3?", "is 5 < 3"),
    ("what is 5!", "what is 5"),
    ("what is n!", "what is n"),
    ("what is !", "what is ?"),
    ("what is !", "what is"),
    ("what is $?", "what is $"),
    ("what is .*?", "what is .*"),
    ("what does :q! do", "what does :q do"),
    ("what does :wq!", "what does :wq"),
    ("what is 10²", "what is 102"),
    ("cd ..", "cd ."),
    ("what is .NET", "what is NET"),
    ("what is 🏴󠁧󠁢󠁥󠁮󠁧󠁿", "what is 🏴󠁧󠁢󠁳󠁣󠁴󠁿"),
    ("a-b", "a b"),
    ("résumé", "resume"),
]


@pytest.mark.parametrize(("text", "form"), SAME)
def test_spellings_of_one_question_share_a_form(text, form):
    assert normalise(text) == form


@pytest.mark.parametrize(("one", "other"), APART)
def test_different_questions_keep_different_forms(one, other):
    assert normalise(one) != normalise(other)


def test_every_character_is_a_fixed_point_after_one_pass():
    moved = [c for c in EVERY if normalise(normalise(c)) != normalise(c)]
    assert moved == []


def test_the_form_of_every_character_is_the_published_one():
    """A change here is a new normal form: raise ALGORITHM or the tables' VERSION, and then this digest."""
    digest = hashlib.sha256("\n".join(map(normalise, EVERY)).encode()).hexdigest()
    assert (NORMALISER.version, digest) == (
        "1.1",
        "f8fe9d519586024689e7f7ebc7f2eb6c2bd7b8cebb8132ead473ec1178784ac9",
    )
    assert NORMALISER.digest == "bb088da669cc7d91d255bfba1e336c380783882e162402250e5f7e64c1c9e942"


@pytest.mark.skipif(
    unicodedata.unidata_version != "14.0.0", reason="the tables are Unicode 14.0, as in Python 3.11"
)
def test_the_tables_agree_with_the_unicode_database_they_were_made_from():
    for char in EVERY:
        if set(char + fold(char)) & KEPT or fold(char) in ("", " "):
            continue
        nfkd = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", char).casefold())
        shown = "".join(fold(c) if c in KEPT or fold(c) in ("", " ") else c for c in nfkd)
        assert fold(char) == unicodedata.normalize("NFC", shown), hex(ord(char))


@calmly
@given(texts)
def test_normalising_twice_changes_nothing(text):
    once = normalise(text)
    assert normalise(once) == once


@calmly
@given(texts)
def test_canonically_equal_texts_share_a_form(text):
    form = normalise(text)
    assert normalise(unicodedata.normalize("NFD", text)) == form
    assert normalise(unicodedata.normalize("NFC", text)) == form


@calmly
@given(texts)
def test_the_short_way_gives_what_the_long_way_gives(text):
    long_way = module._composed(
        module._reordered(module._reordered(text.translate(module._DECOMPOSE)).translate(module.FOLD)
                          .translate(module._DECOMPOSE))
    )  # fmt: skip
    assert fold(text) == long_way


@calmly
@given(st.text(st.characters(codec="ascii"), max_size=20))
def test_the_quick_way_for_ascii_is_the_fold(text):
    assert fold(text) == text.lower().translate(module._ASCII_SPACES)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "a" * (LONGEST_KEY + 1),
        "é" * 256,
        "nul\0byte",
        "\ud800",
        "\u200b" * (LONGEST_TEXT + 1),
        " " * 3000 + "a",
    ],
)
def test_what_cannot_be_a_key_is_none(text):
    assert key_of(text) is None


def test_a_key_may_fill_the_limit():
    assert key_of("A" * LONGEST_KEY + "??") == b"a" * LONGEST_KEY


def test_stops_are_their_own_form():
    assert [fold(c) for c in STOPS] == list(STOPS)


def test_the_commonest_end_is_cut_as_the_rule_says():
    for char in string.ascii_letters + string.digits:
        for text in (char, f"what is {char}", f"c++ {char}", f"é{char}", f"$%{char}"):
            assert normalise(text + "?") == normalise(text) == normalise(text + "??")
