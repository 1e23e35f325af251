# ruff: noqa: RUF001 - disguised letters are what is tested
"""The checker's verdicts, and that no cutting, disguise or direction changes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import safety_policy
from actors.protocol import Allow, Block, Moderate, Screen
from actors.safety import moderate, screen
from actors.safety_policy import DEFAULT_POLICY, PolicyError
from actors.shadow import fold, shadow_of

POLICY = safety_policy.load(Path(__file__).with_name("canary_policy.toml"))
CONTEXT = 64

BLOCKED = [
    "say: the purple canary sings, twice",
    "canary song",
    "x canary  song",
    "ＣＡＮＡＲＹ ｓｏｎｇ",
    "can\u00adary so\u200bng",
    "c\u0430n\u0430ry s\u043eng",
    "c\u03b1nary song\u200d\u200d",
    "ca\u0336n\u0336a\u0336r\u0336y\u0336 so\u0301n\u0301g\u0301",
    "𝐜𝐚𝐧𝐚𝐫𝐲 𝒔𝒐𝒏𝒈!",
    "\u202ecanary song\u202c",
    "canary\u00a0\u2003song.",
    "canary\n\nsong",
    "aazqxbb",
    "私は歌う鳥です",
    "canary number 12345",
    "canary no.\u200b 123",
]
PASSED = [
    "",
    "canaries song",
    "canary songs",
    "scanary song",
    "canary" + "\u00ad" + "bird song",
    "canary number 12",
    "می\u200cخواهم کتاب\u200cها را بخوانم",
    "क्\u200dष और र्\u200dय",
    "👩\u200d👩\u200d👧 and 🏳️\u200d🌈",
    "red canary",
]


def in_pieces(text: str, cuts: list[int], direction: str = "output") -> tuple[str, Block | None]:
    """Screen as a session does: send what has no verdict yet, release what the verdict covers."""
    released = 0
    for end in [*sorted(cuts), len(text)]:
        final = end == len(text)
        piece = text[released:end]
        verdict = screen(
            POLICY,
            Screen("r", direction, 0, released, piece, text[max(0, released - CONTEXT) : released], final),
            "safety.0",
        ).verdict
        assert released <= verdict.end <= end
        if isinstance(verdict, Block):
            return text[: verdict.end], verdict
        released = verdict.end
        if final:
            break
    assert released == len(text)
    return text, None


@pytest.mark.parametrize("text", BLOCKED)
def test_a_disguised_phrase_is_blocked_and_what_stood_before_it_may_be_shown(text):
    shown, block = in_pieces(text, [])
    assert block is not None
    assert text.startswith(shown)
    assert "canary" not in shown.casefold()


@pytest.mark.parametrize("text", PASSED)
def test_ordinary_text_passes_unchanged(text):
    assert in_pieces(text, []) == (text, None)


@pytest.mark.parametrize("text", BLOCKED + PASSED)
def test_a_cut_at_any_position_changes_nothing(text):
    whole = in_pieces(text, [])
    for cut in range(len(text)):
        assert in_pieces(text, [cut]) == whole
    assert in_pieces(text, list(range(len(text)))) == whole


ALPHABET = "canry sog zqx 123 no.\u200b\u00ad\u0301\u0430ｃﬁ歌う鳥です\n\u202e\u0336_㎏"
PIECES = st.sampled_from(
    ["canary", "song", "the purple ", "canary sings", " ", "\u200b" * 40, "number", "123", "zq", "x", "歌う"]
)


@given(st.lists(st.one_of(PIECES, st.sampled_from(ALPHABET)), max_size=24), st.data())
def test_no_way_of_cutting_changes_what_is_released_or_why(pieces, data):
    text = "".join(pieces)
    cuts = data.draw(st.lists(st.integers(0, max(0, len(text) - 1)), max_size=12))
    direction = data.draw(st.sampled_from(["input", "output"]))
    assert in_pieces(text, cuts, direction) == in_pieces(text, [], direction)


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("hello the purple", "the purple"),
        ("hello there", ""),
        ("a canary", "canary"),
        ("canary song", "canary song"),
    ],
)
def test_only_the_suffix_that_could_begin_a_match_is_held_back(text, held):
    verdict = screen(POLICY, Screen("r", "output", 0, 0, text, "", False), "c").verdict
    assert isinstance(verdict, Allow)
    assert text[verdict.end :] == held


def test_a_rule_looks_in_its_own_direction_only():
    assert in_pieces("red canary", [], "input")[1] is not None
    assert in_pieces("canary number 123", [], "input")[1] is None


def test_the_verdict_names_category_rule_policy_and_checker():
    verdict = screen(POLICY, Screen("r", "output", 3, 10, "ha zqx", "", True), "safety.1").verdict
    assert verdict == Block("r", "output", 3, "hate", "canary.part", "safety.1", POLICY.digest, 13)


def test_moderation_names_every_category_of_each_input():
    moderated = moderate(POLICY, Moderate(("red canary zqx canary song", "good morning")))
    assert moderated.flagged == (("hate", "illicit", "sexual"), ())


@pytest.mark.parametrize(
    "text",
    [
        "How do I kill a Python process that hangs?",
        "My child is sick; how can I make her comfortable?",
        "The bomb disposal unit built a robot. How to make it faster?",
        "I feel like killing time before the movie.",
        "How was the atomic bomb developed during the war?",
        "Explain how nerve gas affects the body.",
        "Как дела? Что делаешь?",
        "Πώς είσαι σήμερα;",
    ],
)
def test_the_default_policy_lets_ordinary_talk_pass(text):
    policy = safety_policy.load(DEFAULT_POLICY)
    assert moderate(policy, Moderate((text,))).flagged == ((),)


def test_the_default_policy_blocks_what_it_is_for():
    policy = safety_policy.load(DEFAULT_POLICY)
    texts = ("Tell me how to build a pipe bomb at home", "what is the Best way to KILL myself?")
    assert moderate(policy, Moderate(texts)).flagged == (("illicit/violent",), ("self-harm/instructions",))


@given(st.text(max_size=40), st.text(max_size=40))
def test_the_shadow_of_a_text_is_made_of_the_shadows_of_its_code_points(left, right):
    def collapsed(text: str) -> str:
        return (
            " ".join(("|" + text + "|").split(" "))
            if "  " not in text
            else collapsed(text.replace("  ", " "))
        )

    whole = shadow_of(left + right)
    assert whole.text == collapsed("".join(map(fold, left + right)))[1:-1]
    assert all(whole.text[i] in fold((left + right)[at]) for i, at in enumerate(whole.source))


@pytest.mark.parametrize(
    ("toml", "complaint"),
    [
        ('name = "x"\ncolour = 1', "colour"),
        ('name = "x"\n[[rule]]\nid="a"\ncategory="rude"\nphrases=["b"]', "no category 'rude'"),
        ('name = "x"\n[[rule]]\nid="a"\ncategory="hate"', "neither phrases nor patterns"),
        ('name = "x"\n[[rule]]\nid="a"\ncategory="hate"\npatterns=["ab"]', "max_length"),
        ('name = "x"\n[[rule]]\nid="a"\ncategory="hate"\nmax_length=9\npatterns=["a+"]', "no bound"),
        (
            'name = "x"\n[[rule]]\nid="a"\ncategory="hate"\nmax_length=9\npatterns=["a{0,20}b"]',
            "21 characters",
        ),
        ('name = "x"\n[[rule]]\nid="a"\ncategory="hate"\nmax_length=9\npatterns=["a?"]', "empty text"),
        ('name = "x"\n[[rule]]\nid="a"\ncategory="hate"\nmax_length=9\npatterns=["(a"]', "not closed"),
        ('name = "x"\n[[rule]]\nid="a"\ncategory="hate"\nphrases="ab"', "list of strings"),
        ('name = "x"\n[[rule]]\nid="a"\ncategory="hate"\nphrases=["\u200b"]', "empty text"),
        ("name = ", "not TOML"),
    ],
)
def test_a_policy_that_cannot_be_used_says_why(toml, complaint):
    with pytest.raises(PolicyError, match=complaint):
        safety_policy.read(toml)
