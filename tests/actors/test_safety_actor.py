"""The checker in a tree: it says Allow or Block, or nothing at all."""

from pathlib import Path

import pytest
import trio

from actors.protocol import Allow, Block, Moderate, ReadMetrics, Screen, Screened
from actors.safety import LONG_TEXT, Safety, SafetySettings
from actors.safety_policy import PolicyError
from supervision.local import LocalTree

POLICY = str(Path(__file__).with_name("canary_policy.toml"))


def in_tree(test):
    def run(tmp_path):
        async def body():
            async with LocalTree(state_dir=tmp_path) as tree:
                await test(tree)

        trio.run(body)

    run.__name__ = test.__name__
    return run


async def screened(client, text, to="safety.0"):
    reply = await client.ask(to, Screen("r", "output", 0, 0, text, "", True), timeout=60)
    assert isinstance(reply, Screened)
    return reply.verdict


@in_tree
async def test_short_and_long_texts_get_the_same_verdicts(tree):
    await tree.start("safety.0", Safety(SafetySettings(POLICY)))
    client = tree.client("session.0")
    for filler in (10, LONG_TEXT + 10):
        clean = "a" * filler
        assert await screened(client, clean) == Allow(
            "r", "output", 0, filler, "safety.0", (await screened(client, "")).policy
        )
        verdict = await screened(client, clean + " canary song.")
        assert isinstance(verdict, Block)
        assert (verdict.rule, verdict.end) == ("canary.phrase", filler + 1)


@in_tree
async def test_a_replica_and_the_fallback_agree_and_name_themselves(tree):
    client = tree.client("session.0")
    found = []
    for name in ("safety.0", "safety.1", "safety_fallback"):
        await tree.start(name, Safety(SafetySettings(POLICY)))
        found.append(await screened(client, "canary song", to=name))
    assert [v.checker for v in found] == ["safety.0", "safety.1", "safety_fallback"]
    assert len({(v.rule, v.category, v.end, v.policy) for v in found}) == 1


@in_tree
async def test_moderation_and_figures(tree):
    await tree.start("safety.0", Safety(SafetySettings(POLICY)))
    client = tree.client("edge.0")
    moderated = await client.ask("safety.0", Moderate(("hello", "aazqx")), timeout=60)
    assert moderated.flagged == ((), ("hate",))
    await screened(client, "zqx")
    lines = (await client.ask("safety.0", ReadMetrics(), timeout=60)).lines
    labels = 'actor="safety.0",direction="output",verdict="block",category="hate"'
    assert f"antiphon_safety_verdicts_total{{{labels}}} 1" in lines


@pytest.mark.parametrize("text", ["name = ", 'name = "x"\n[[rule]]\nid = 1'])
def test_without_a_usable_policy_there_is_no_checker(tmp_path, text):
    (tmp_path / "policy.toml").write_text(text)

    @in_tree
    async def start(tree):
        with pytest.raises(PolicyError, match=r"policy\.toml"):
            await tree.start("safety.0", Safety(SafetySettings(str(tmp_path / "policy.toml"))))

    start(tmp_path)


def test_a_missing_policy_file_is_named(tmp_path):
    @in_tree
    async def start(tree):
        with pytest.raises(PolicyError, match=r"nowhere\.toml"):
            await tree.start("safety.0", Safety(SafetySettings(str(tmp_path / "nowhere.toml"))))

    start(tmp_path)
