"""What is asked again stays; what is not goes; no history makes it larger than its bound."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store.recent import Recent


def put(recent, key, value):
    recent.put_many([key], [value])


def test_what_was_put_is_got():
    recent = Recent(2, 10)
    recent.put_many(["a", "c"], [1, 3])
    assert recent.get_many(["a", "b", "c"]) == [1, None, 3]


def test_what_is_asked_again_outlives_what_is_not():
    recent = Recent(2, 10)
    put(recent, "kept", 1)
    for number in range(10):
        put(recent, f"t{number}", 1)
        assert recent.get_many(["kept"]) == [1]
    assert recent.get_many(["t0"]) == [None]


def test_a_long_text_is_not_kept():
    recent = Recent(2, 3)
    recent.put_many(["abcd", "abc"], [1, 2])
    assert (recent.get_many(["abcd", "abc"]), len(recent)) == ([None, 2], 1)


def test_everything_can_be_forgotten():
    recent = Recent(1, 3)
    put(recent, "a", 1)
    put(recent, "b", 2)
    recent.clear()
    assert (recent.get_many(["a", "b"]), len(recent)) == ([None, None], 0)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(1, 9), max_size=3))), st.integers(1, 4))
def test_it_is_bounded_and_never_wrong(steps, generation):
    recent = Recent(generation, 10)
    for is_put, numbers in steps:
        if is_put:
            recent.put_many([str(number) for number in numbers], numbers)
        got = recent.get_many([str(number) for number in numbers])
        assert all(value in {None, number} for value, number in zip(got, numbers, strict=True))
        assert len(recent) <= 2 * (generation + 2), "two generations, and what one call adds to each"
