"""The engine as its callers see it: right tokens, one end for each request, and nobody hurt by another's fault."""

import numpy as np
import pytest
import tiny_models
from driving import ask, drain, greedy, load, note
from reference import reference_logprobs

from gpu.engine import Engine
from gpu.errors import BadRequest, EngineFull, ModelError
from gpu.kernels import threads
from gpu.llama import Llama
from gpu.sampling_params import SamplingParams
from gpu.sequence import Request
from gpu.weights import open_weights

PROMPT = tuple(range(40, 77))


@pytest.fixture(scope="module")
def engine(tiny):
    made = load(tiny)
    yield made
    made.close()


@pytest.fixture
def quiet(engine):
    """The shared engine, with nothing in it and nothing cached."""
    for name in list(engine._sequences):
        engine.cancel(name)
    drain(engine)
    engine.pool.clear_cache()
    yield engine
    assert engine.pool.in_use == 0


def test_greedy_tokens_and_logprobs_are_the_fp32_reference_s(quiet, tiny):
    reply = ask(quiet, PROMPT, greedy(12, logprobs=3))
    _, source = open_weights(tiny)
    expected = reference_logprobs(source, [*PROMPT, *reply.tokens])[len(PROMPT) - 1 : -1]
    assert reply.tokens == expected.argmax(-1).tolist()
    for detail, row in zip(reply.logprobs, expected, strict=True):
        assert detail.logprob == pytest.approx(row[detail.token], abs=5e-3)
        assert [token for token, _ in detail.top] == np.argsort(-row)[:3].tolist()
        assert [value for _, value in detail.top] == pytest.approx(sorted(row)[:-4:-1], abs=5e-3)


def test_a_reply_counts_its_positions_from_what_was_given_out(quiet):
    whole = ask(quiet, PROMPT, greedy(10))
    quiet.add(Request("later", PROMPT, greedy(10), emitted=tuple(whole.tokens[:4])))
    outputs = []
    while quiet.has_work:
        outputs += quiet.step().outputs
    assert [out.position for out in outputs] == [4, 5, 6, 7, 8, 9]
    assert [token for out in outputs for token in out.tokens] == whole.tokens[4:]
    assert outputs[-1].finish == "length"
    assert outputs[0].prompt_tokens == len(PROMPT)


def test_a_resumed_request_that_had_everything_ends_at_once(quiet):
    quiet.add(Request("done", PROMPT, greedy(3), emitted=(1, 2, 3)))
    (out,) = quiet.step().outputs
    assert (out.position, out.tokens, out.finish) == (3, (), "length")
    assert not quiet.has_work


def test_an_end_token_ends_the_reply_and_is_not_in_it(quiet):
    first = ask(quiet, PROMPT, greedy(6)).tokens
    reply = ask(quiet, PROMPT, greedy(6, stop_token_ids=(first[3],)))
    stop = first.index(first[3])
    assert (reply.tokens, reply.finish) == (first[:stop], "stop")


def test_the_model_s_own_end_ends_unless_told_otherwise(quiet):
    forced = ((tiny_models.EOS, 100.0),)
    reply = ask(quiet, PROMPT, greedy(4, logit_bias=forced, ignore_eos=False))
    assert (reply.tokens, reply.finish) == ([], "stop")
    reply = ask(quiet, PROMPT, greedy(4, logit_bias=forced, ignore_eos=True))
    assert (reply.tokens, reply.finish) == ([tiny_models.EOS] * 4, "length")
    reply = ask(quiet, PROMPT, greedy(4, logit_bias=forced, ignore_eos=False, min_tokens=2))
    assert (len(reply.tokens), reply.finish) == (2, "stop")
    assert tiny_models.EOS not in reply.tokens


def test_the_same_seed_repeats_and_another_does_not(quiet):
    def sampled(seed):
        return ask(
            quiet, PROMPT, SamplingParams(max_tokens=24, temperature=2.0, seed=seed, ignore_eos=True)
        ).tokens

    assert sampled(5) == sampled(5)
    assert sampled(5) != sampled(6)
    assert sampled(5 + 2**64) == sampled(5)


def test_penalties_keep_count_over_the_reply(quiet):
    plain = ask(quiet, PROMPT, greedy(24)).tokens
    assert len(set(plain)) < 24
    assert len(set(ask(quiet, PROMPT, greedy(24, presence_penalty=1000.0)).tokens)) == 24
    assert not set(ask(quiet, PROMPT, greedy(24, repetition_penalty=1e9)).tokens) & set(PROMPT)


HOT = {"max_tokens": 24, "temperature": 50.0, "seed": 1, "ignore_eos": True}
"""Nearly uniform: what is not cut away will be drawn."""


@pytest.mark.parametrize(
    "cut", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=lambda cut: next(iter(cut))
)
def test_a_cut_to_the_likeliest_token_is_greedy_at_any_temperature(quiet, cut):
    plain = ask(quiet, PROMPT, greedy(24)).tokens
    assert ask(quiet, PROMPT, SamplingParams(**HOT)).tokens != plain
    assert ask(quiet, PROMPT, SamplingParams(**HOT, **cut)).tokens == plain


def test_top_k_keeps_as_many_as_it_says(quiet):
    reply = ask(quiet, PROMPT, SamplingParams(**HOT, top_k=3, logprobs=4))
    ranks = [
        [token for token, _ in detail.top].index(token)
        for token, detail in zip(reply.tokens, reply.logprobs, strict=True)
    ]
    assert set(ranks) == {0, 1, 2}


def test_a_frequency_penalty_counts_what_was_said(quiet):
    assert len(set(ask(quiet, PROMPT, greedy(24, frequency_penalty=1000.0)).tokens)) == 24


def test_a_thread_that_is_late_for_a_step_finds_nothing_to_do_in_the_next(quiet):
    quiet.add(Request("r", PROMPT, greedy(2)))
    quiet.step()
    job = quiet.model.kernels._crew._job
    assert threads._run(*job, 0) == 0, "the launch is over: what its operations mean may change at any moment"
    drain(quiet)


def test_the_pool_is_a_quarter_of_what_the_first_step_left_less_the_weights(tiny, monkeypatch):
    engine = load(tiny)
    weights, block = engine.model.kernels.weight_bytes, engine.model.kernels.block_bytes
    engine.close()
    assert weights > 0
    stepped = []
    step = Llama.step
    monkeypatch.setattr(Llama, "step", lambda model, batch: stepped.append(batch) or step(model, batch))

    def left(blocks):
        def available():
            assert stepped, "nobody knows what a step needs before there was one"
            return weights + 4 * blocks * block

        return available

    monkeypatch.setattr("gpu.engine.available_bytes", left(10))
    engine = load(tiny, kv_bytes=None)
    assert (engine.pool.total, engine.kv_bytes) == (10, 10 * block)
    assert len(ask(engine, PROMPT, greedy(12)).tokens) == 12
    engine.close()
    monkeypatch.setattr("gpu.engine.available_bytes", left(0))
    with pytest.raises(ModelError, match="no memory for one KV block"):
        load(tiny, kv_bytes=None)


def test_a_step_says_who_left_the_queue_and_says_it_once(tiny):
    engine = load(tiny, max_batch=1)
    for name in ("first", "second"):
        engine.add(Request(name, PROMPT, greedy(2)))
    admitted = []
    while engine.has_work:
        admitted.append(engine.step().admitted)
    engine.close()
    assert admitted[0] == ("first",)
    assert [name for names in admitted for name in names] == ["first", "second"]


def test_the_second_request_finds_the_first_one_s_prefix_and_another_owner_finds_nothing(quiet):
    first = ask(quiet, PROMPT, owner="ann")
    second = ask(quiet, PROMPT, owner="ann")
    assert (first.cached, second.cached) == (0, 32)
    assert second.tokens == first.tokens
    assert ask(quiet, PROMPT, owner="bob").cached == 0
    assert ask(quiet, PROMPT, owner="ann", cache_key="other").cached == 0


def test_at_least_one_prompt_token_is_always_computed(quiet):
    prompt = PROMPT[:32]
    tokens = ask(quiet, prompt).tokens
    again = ask(quiet, prompt)
    assert (again.cached, again.tokens) == (16, tokens)


def test_a_prompt_cancelled_half_way_leaves_only_whole_blocks_behind(quiet):
    golden = ask(quiet, PROMPT).tokens
    quiet.pool.clear_cache()
    quiet.scheduler.token_budget = 20
    quiet.add(Request("gone", PROMPT, greedy()))
    quiet.step()
    assert quiet.cancel("gone")
    assert quiet.pool.in_use == 0
    quiet.scheduler.token_budget = 64
    reply = drain(quiet)["gone"]
    assert reply.finish == "cancelled"
    again = ask(quiet, PROMPT)
    assert (again.cached, again.tokens) == (16, golden)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancelling_in_any_state_frees_blocks_at_once_and_touches_nobody_else(quiet, steps):
    golden = ask(quiet, PROMPT, greedy(12)).tokens
    quiet.pool.clear_cache()
    quiet.scheduler.token_budget = 20
    quiet.add(Request("keep", PROMPT, greedy(12)))
    quiet.add(Request("drop", PROMPT[::-1], greedy(12)))
    replies = {}
    for _ in range(steps):
        note(replies, quiet.step())
    before = quiet.pool.in_use
    held = len(quiet._sequences["drop"].blocks)
    assert quiet.cancel("drop")
    assert quiet.pool.in_use == before - held
    assert not quiet.cancel("drop")
    while quiet.has_work:
        note(replies, quiet.step())
    quiet.scheduler.token_budget = 64
    assert replies["drop"].finish == "cancelled"
    assert replies["keep"].tokens == golden
    assert not quiet.cancel("never was")


def test_a_pool_far_too_small_finishes_everything_with_the_text_unchanged(tiny):
    with_room = load(tiny)
    golden = {str(i): ask(with_room, PROMPT[i:], greedy(50)).tokens for i in range(6)}
    with_room.close()
    block = with_room.model.kernels.block_bytes
    cramped = load(tiny, kv_bytes=7 * block)
    assert (cramped.pool.total, cramped.context_length) == (7, 112)
    for i in range(6):
        cramped.add(Request(str(i), PROMPT[i:], greedy(50)))
    preempted, replies = 0, {}
    while cramped.has_work:
        output = cramped.step()
        preempted += output.stats.preemptions
        note(replies, output)
    assert preempted > 0
    assert {name: reply.tokens for name, reply in replies.items()} == golden
    assert cramped.pool.in_use == 0
    cramped.close()


def test_a_request_whose_numbers_fail_ends_alone_and_its_blocks_harm_nobody(tmp_path):
    weights = tiny_models.random_weights()
    weights["token_embd.weight"][200] = np.nan
    path = tiny_models.write_gguf(tmp_path / "poison.gguf", weights)
    engine = load(path, kv_bytes=200_000)
    golden = ask(engine, PROMPT, greedy(12)).tokens
    engine.pool.clear_cache()
    engine.add(Request("good", PROMPT, greedy(12)))
    engine.add(Request("bad", (*PROMPT[:20], 200), greedy(12)))
    replies = drain(engine)
    assert (replies["bad"].finish, replies["bad"].tokens) == ("error", [])
    assert "finite" in replies["bad"].error
    assert replies["good"].tokens == golden
    # What the failed request left in memory must not be read by whoever gets its blocks.
    engine.pool.clear_cache()
    for i in range(8):
        engine.add(Request(str(i), PROMPT, greedy(12), owner=str(i)))
    assert all(reply.tokens == golden for reply in drain(engine).values())
    engine.close()


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("prompt", {"prompt": ()}),
        ("prompt", {"prompt": (1, tiny_models.VOCAB)}),
        ("prompt", {"prompt": (-1,)}),
        ("emitted", {"emitted": (tiny_models.VOCAB,)}),
        ("logit_bias", {"logit_bias": ((tiny_models.VOCAB, -100.0),)}),
        ("logit_bias", {"logit_bias": ((1, float("nan")),)}),
        ("stop_token_ids", {"stop_token_ids": (191222,)}),
        ("temperature", {"temperature": float("nan")}),
        ("temperature", {"temperature": -1.0}),
        ("top_p", {"top_p": -1.0}),
        ("top_p", {"top_p": 0.0}),
        ("top_k", {"top_k": -1}),
        ("min_p", {"min_p": 1.5}),
        ("min_p", {"min_p": float("inf")}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("frequency_penalty", {"frequency_penalty": float("-inf")}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 10**12}),
        ("logprobs", {"logprobs": 21}),
        ("priority", {"priority": 10**9}),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named_and_the_next_request_is_well(quiet, param, changes):
    golden = ask(quiet, PROMPT).tokens
    fields = {"prompt": PROMPT, "emitted": (), "priority": 0}
    request = {key: changes.get(key, value) for key, value in fields.items()}
    params = {key: value for key, value in changes.items() if key not in fields}
    with pytest.raises(BadRequest) as caught:
        quiet.add(Request("bad", params=SamplingParams(**{"max_tokens": 4, **params}), **request))
    assert caught.value.param == param
    assert not quiet.has_work
    assert ask(quiet, PROMPT).tokens == golden


def test_a_prompt_of_the_context_minus_one_works(quiet):
    prompt = tuple(i % 250 for i in range(quiet.context_length - 1))
    reply = ask(quiet, prompt, greedy(1))
    assert (len(reply.tokens), reply.finish) == (1, "length")
    with pytest.raises(BadRequest, match="context"):
        quiet.add(Request("over", (*prompt, 1), greedy(1)))


def test_an_id_that_is_there_already_and_a_full_queue_are_refused(tiny):
    engine = load(tiny, max_waiting=2)
    engine.add(Request("a", PROMPT, greedy()))
    with pytest.raises(BadRequest, match="already"):
        engine.add(Request("a", PROMPT, greedy()))
    engine.add(Request("b", PROMPT, greedy()))
    with pytest.raises(EngineFull):
        engine.add(Request("c", PROMPT, greedy()))
    assert set(drain(engine)) == {"a", "b"}
    engine.close()


def test_a_step_tells_of_itself(quiet):
    quiet.add(Request("a", PROMPT, greedy(2), owner="stats"))
    first, second = quiet.step().stats, quiet.step().stats
    assert (first.batch, first.prefilled, first.decoded, first.prefix_queried) == (
        1,
        len(PROMPT),
        0,
        len(PROMPT),
    )
    assert (second.batch, second.prefilled, second.decoded) == (1, 0, 1)
    assert second.bytes_moved > 100_000
    assert min(first.forward_seconds, first.sampling_seconds, first.python_seconds) > 0
    assert (first.blocks_used, first.blocks_total) == (3, quiet.pool.total)


def test_threads_change_nothing(tiny):
    several, one = load(tiny, threads=3), load(tiny, threads=1)
    for engine in (several, one):
        for i in range(5):
            engine.add(Request(str(i), PROMPT[i:], greedy(10, logprobs=0)))
    assert drain(several) == drain(one)
    several.close()
    one.close()


def test_loading_shows_progress_and_a_second_load_shares_the_tiles(tiny, monkeypatch):
    seen = []
    load(tiny, progress=lambda done, total: seen.append((done, total))).close()
    assert seen[-1][0] == seen[-1][1] > 0

    def never(*_):
        raise AssertionError("made again what was there")

    monkeypatch.setattr("gpu.kernels.packing._make", never)
    load(tiny).close()


def test_no_room_for_a_single_block_is_said(tiny):
    with pytest.raises(ModelError, match="kv_bytes"):
        Engine.load(tiny, kv_bytes=10, threads=1)


@pytest.mark.model
def test_the_capital_of_france(default_model):
    from gpu.chat_template import encode_chat, load_chat_template
    from gpu.tokenizer import load_tokenizer

    tokenizer, template = load_tokenizer(default_model), load_chat_template(default_model)
    prompt = encode_chat(tokenizer, template, [{"role": "user", "content": "What is the capital of France?"}])
    engine = load(default_model, kv_bytes=64 << 20)
    reply = ask(engine, prompt, greedy(32, ignore_eos=False, logprobs=0))
    assert tokenizer.decode_bytes(reply.tokens) == b"The capital of France is Paris."
    assert reply.finish == "stop"
    _, source = open_weights(default_model)
    expected = reference_logprobs(source, [*prompt, *reply.tokens])[len(prompt) - 1 : -1]
    got = [detail.logprob for detail in reply.logprobs]
    assert got == pytest.approx(
        [row[token] for row, token in zip(expected, reply.tokens, strict=True)], abs=0.02
    )
    engine.close()
