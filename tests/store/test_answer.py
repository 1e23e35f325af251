"""Packed answers: whole whatever their length, short where there is no room, and refused when damaged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.answer import DamagedAnswer, pack_answer, unpack_answer

LONG = "A sentence that says the same as every other. " * 60


@given(st.text(max_size=50), st.integers(0, 60), st.integers(1, 300))
def test_any_text_comes_back(text, room, times):
    assert unpack_answer(pack_answer(text * times, room)) == text * times


def test_it_is_deflated_only_where_there_is_no_room_and_only_if_that_helps():
    assert pack_answer(LONG, len(LONG) + 1) == b"\0" + LONG.encode()
    assert len(pack_answer(LONG, len(LONG))) < len(LONG) // 10
    assert pack_answer("short", 0) == b"\0short"


@pytest.mark.parametrize(
    "packed",
    [b"", b"\2text", b"\0\xff", b"\1", b"\1\xff\xff", pack_answer(LONG, 0)[:-5]],
    ids=["empty", "unknown kind", "no UTF-8", "nothing", "no deflate", "cut off"],
)
def test_damage_is_refused(packed):
    with pytest.raises(DamagedAnswer):
        unpack_answer(packed)
