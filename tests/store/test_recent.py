"""What is asked again stays; what is not goes; no history makes it larger than its bound."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store.recent import Recent


def test_what_was_put_is_got():
    recent = Recent(2, 10)
    recent.put("a", 1)
    assert (recent.get("a"), recent.get("b")) == (1, None)


def test_what_is_asked_again_outlives_what_is_not():
    recent = Recent(2, 10)
    recent.put("kept", 0)
    for number in range(10):
        recent.put(f"t{number}", number)
        assert recent.get("kept") == 0
    assert recent.get("t0") is None


def test_a_long_text_is_not_kept():
    recent = Recent(2, 3)
    recent.put("abcd", 1)
    assert (recent.get("abcd"), len(recent)) == (None, 0)


def test_everything_can_be_forgotten():
    recent = Recent(1, 3)
    recent.put("a", 1)
    recent.put("b", 2)
    recent.clear()
    assert (recent.get("a"), recent.get("b"), len(recent)) == (None, None, 0)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9))), st.integers(1, 4))
def test_it_is_bounded_and_never_wrong(steps, generation):
    recent = Recent(generation, 10)
    for is_put, number in steps:
        if is_put:
            recent.put(str(number), number)
        assert recent.get(str(number)) in {None, number}
        assert len(recent) <= 2 * generation
