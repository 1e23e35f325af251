from __future__ import annotations

import pytest
from attrs import evolve

from actors.protocol import ChatMessage
from actors.scripted_engine import EOS, BytesText, ScriptedEngine, echo
from gpu.errors import BadRequest, EngineFull
from gpu.sampling_params import SamplingParams
from gpu.sequence import Request, SequenceOutput


def request(text: str = "hi", name: str = "r", **fields: object) -> Request:
    prompt = tuple(BytesText().encode([ChatMessage("user", text)]))
    return evolve(Request(name, prompt, SamplingParams(100, 0.0)), **fields)


def run(engine: ScriptedEngine) -> list[SequenceOutput]:
    outputs: list[SequenceOutput] = []
    while engine.has_work:
        outputs += engine.step().outputs
    return outputs


def said(outputs: list[SequenceOutput]) -> bytes:
    return bytes(token for output in outputs for token in output.tokens)


def test_it_says_the_last_message_back_a_token_a_step() -> None:
    engine = ScriptedEngine()
    engine.add(request("hi"))
    outputs = run(engine)
    assert said(outputs) == b"You said: hi"
    assert [output.position for output in outputs] == list(range(13))
    assert outputs[-1].finish == "stop"
    assert outputs[-1].tokens == ()


@pytest.mark.parametrize("emitted", range(13))
def test_resumed_anywhere_it_says_the_rest(emitted: int) -> None:
    whole = b"You said: hi"
    engine = ScriptedEngine()
    engine.add(request("hi", emitted=tuple(whole[:emitted])))
    outputs = run(engine)
    assert said(outputs) == whole[emitted:]
    assert outputs[0].position == emitted


def test_with_a_temperature_the_seed_and_position_decide() -> None:
    def reply(seed: int) -> bytes:
        return echo(request("abcdefgh", params=SamplingParams(100, 1.0, seed=seed)))

    assert reply(1) == reply(1)
    assert reply(1) != reply(2)
    assert len(reply(1)) == 8


def test_it_stops_at_max_tokens_and_goes_on_past_the_end_when_told() -> None:
    engine = ScriptedEngine()
    engine.add(request("hi", params=SamplingParams(3, 0.0)))
    engine.add(request("hi", "long", params=SamplingParams(30, 0.0, ignore_eos=True)))
    outputs = run(engine)
    short = [output for output in outputs if output.id == "r"]
    long = [output for output in outputs if output.id == "long"]
    assert (said(short), short[-1].finish) == (b"You", "length")
    assert (said(long), long[-1].finish) == ((b"You said: hi" * 3)[:30], "length")


def test_a_cancelled_request_is_reported_once_and_holds_nothing() -> None:
    engine = ScriptedEngine()
    engine.add(request())
    engine.step()
    assert engine.cancel("r")
    assert not engine.cancel("r")
    step = engine.step()
    assert [output.finish for output in step.outputs] == ["cancelled"]
    assert step.stats.blocks_used == 0
    assert not engine.has_work


def test_it_refuses_what_the_real_one_refuses() -> None:
    engine = ScriptedEngine(max_batch=1, max_waiting=0)
    engine.add(request())
    with pytest.raises(BadRequest):
        engine.add(request())
    with pytest.raises(EngineFull):
        engine.add(request(name="second"))
    with pytest.raises(BadRequest):
        ScriptedEngine().add(request(prompt=(65,) * 8192))


def test_its_tokenizer_keeps_every_byte() -> None:
    text = BytesText()
    tokens = text.encode([ChatMessage("user", "été 漢 👍")])
    assert text.detokenizer().push(tokens) == "<user>été 漢 👍\n<assistant>"
    assert b"".join(map(text.token_bytes, tokens)) == bytes(tokens)
    assert text.token_bytes(EOS) == b""
    with pytest.raises(BadRequest):
        text.encode([ChatMessage("user", "\ud800")])
