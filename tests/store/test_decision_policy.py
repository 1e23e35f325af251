"""The policy is sticky, and what it logs is the probability its action had."""

import pytest

from store.decision_policy import COIN, Decision, Policy

OWNERS = [f"owner-{i}" for i in range(4000)]


def test_without_a_slice_the_threshold_decides():
    policy = Policy(0.5)
    assert policy.decide(0.5, "a", "e") == Decision(True, "policy", 1.0)
    assert policy.decide(0.49, "a", "e") == Decision(False, "policy", 1.0)


def test_an_owner_stays_in_the_slice_and_keeps_the_coin():
    first, second = Policy(0.5, 0.3, "salt"), Policy(0.9, 0.3, "salt")
    for owner in OWNERS[:200]:
        one, other = first.decide(0.7, owner, "e"), second.decide(0.7, owner, "e")
        assert one.arm == other.arm
        if one.arm == "explore":
            assert one.serve == other.serve


def test_another_salt_draws_another_slice():
    def slices(salt):
        return [Policy(0.5, 0.3, salt).decide(0.7, owner, "e").arm for owner in OWNERS[:200]]

    assert slices("one") != slices("two")


@pytest.mark.parametrize("score", [0.2, 0.8])
def test_actions_come_as_often_as_their_propensity_says(score):
    policy = Policy(0.5, 0.2, "salt")
    decisions = [policy.decide(score, owner, "e") for owner in OWNERS]
    for serve in (True, False):
        chosen = [d for d in decisions if d.serve is serve]
        (propensity,) = {round(d.propensity, 12) for d in chosen}
        assert len(chosen) / len(decisions) == pytest.approx(propensity, abs=0.03)


def test_propensities_of_the_two_actions_sum_to_one():
    policy = Policy(0.5, 0.2, "salt")
    by_action = {d.serve: d.propensity for d in (policy.decide(0.8, owner, "e") for owner in OWNERS)}
    assert by_action == {True: pytest.approx(0.8 + 0.2 * COIN), False: pytest.approx(0.2 * COIN)}


def test_the_coin_is_drawn_for_each_entry():
    policy = Policy(0.5, 1.0, "salt")
    assert len({policy.decide(0.8, "a", f"entry-{i}").serve for i in range(20)}) == 2


@pytest.mark.parametrize("explore", [-0.1, 1.1])
def test_a_slice_is_a_share(explore):
    with pytest.raises(ValueError, match="explore"):
        Policy(0.5, explore)
