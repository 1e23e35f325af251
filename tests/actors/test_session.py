"""A turn's life as an edge sees it, without faults: what is said, refused, stopped, blocked, read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from actors.protocol import (
    Attach,
    CancelTurn,
    ChatMessage,
    ErrorBody,
    Leave,
    LiveTurnList,
    LiveTurns,
    Metrics,
    OpenTurn,
    ReadMetrics,
    ReadTurn,
    TextDelta,
    TurnCancelled,
    TurnDone,
    TurnFailed,
    TurnRecord,
    TurnRefused,
    Usage,
)
from gpu.sampling_params import SamplingParams
from supervision.local import Client
from tests.actors.small_tree import CONTEXT_LENGTH, Reading, SmallTree, on_virtual_time, script_of, small_tree

ALL_DAY = "x" * 600


async def until(reading: Reading, characters: int) -> None:
    """Hear a turn until so much of its text is there."""
    while len(reading.text) < characters:
        message, _ = await reading.client.receive()
        await reading.hear(message)


# ------------------------------------------------------------------ the normal way


@on_virtual_time
async def test_a_turn_streams_its_reply_and_is_settled_and_charged_once(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        reading = await small.say("bonjour, été")
        golden = "You said: bonjour, été"
        assert reading.text == golden
        assert reading.reasons == ["stop"]
        tokens = len(golden.encode())
        prompt = reading.opened.prompt_tokens
        assert reading.last == TurnDone(len(reading.events), Usage(prompt, tokens))
        assert reading.headers == {"x-ratelimit-limit-requests": "60"}
        assert small.books.reserved == {}
        assert small.books.settled == {"turn-1": prompt + tokens}
        await trio.sleep(1)
        assert small.books.tokens_of("turn-1") == {0: tokens}
        assert len(small.books.charges["turn-1"]) == 1
        assert small.books.witnessed[("turn-1", 0)] == set(range(tokens))


@on_virtual_time
async def test_sixteen_chats_stream_beside_each_other(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        edges = [small.tree.client(f"edge.{n}") for n in range(1, 17)]
        readings = [small.reader(small.opening(f"chat {n}"), edge) for n, edge in enumerate(edges)]
        firsts, lasts = [], []

        async def chat(reading: Reading) -> None:
            await reading.open()
            await until(reading, 1)
            firsts.append(trio.current_time())
            await reading.finish()
            lasts.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            for reading in readings:
                nursery.start_soon(chat, reading)
        assert max(firsts) < min(lasts)
        assert [r.text for r in readings] == [f"You said: chat {n}" for n in range(16)]
        assert small.books.reserved == {}


@on_virtual_time
async def test_several_choices_are_seeded_apart_and_repeatable(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        three = await small.say("a long enough text", n=3, temperature=1.0, seed=7)
        assert len(set(three.texts)) == 3
        alone = [(await small.say("a long enough text", temperature=1.0, seed=7 + i)).text for i in range(3)]
        assert three.texts == alone
        await trio.sleep(1)
        tokens = len("a long enough text")
        assert small.books.tokens_of(three.request_id) == {0: tokens, 1: tokens, 2: tokens}
        assert three.last.usage == Usage(three.opened.prompt_tokens, 3 * tokens)


@on_virtual_time
async def test_no_half_character_ever_goes_out(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        said = "👩‍🚀 Привет 漢字 é"
        reading = await small.say(said)
        assert reading.text == "You said: " + said
        assert all("\ufffd" not in e.text for e in reading.events if isinstance(e, TextDelta))


@on_virtual_time
async def test_a_reply_cut_in_mid_character_ends_before_it(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        reading = await small.say("é", max_tokens=len(b"You said: ") + 1)
        assert (reading.text, reading.reasons) == ("You said: ", ["length"])
        assert reading.last.usage.completion_tokens == len(b"You said: ") + 1


@on_virtual_time
async def test_log_probabilities_come_with_the_text_of_their_tokens(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        reading = await small.say("été", logprobs=1)
        deltas = [e for e in reading.events if isinstance(e, TextDelta)]
        assert b"".join(lp.token for e in deltas for lp in e.logprobs) == reading.text.encode()
        for delta in deltas:
            assert b"".join(lp.token for lp in delta.logprobs).decode() == delta.text
            assert all(lp.top == ((lp.token, 0.0),) for lp in delta.logprobs)


@on_virtual_time
async def test_a_model_is_called_by_its_own_name_in_the_reply(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        assert (await small.say("hi")).opened.model == "small"


# ------------------------------------------------------------------ stop strings


@on_virtual_time
async def test_a_stop_string_over_many_tokens_leaks_nothing_and_frees_the_engine(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of("abcDEFGHIJ" + ALL_DAY)) as small:
        reading = await small.say("go", stop=("DEFGHIJ",))
        assert (reading.text, reading.reasons) == ("abc", ["stop"])
        batcher = small.tree._running["batcher.0"].runtime.actor
        await trio.sleep(1)
        assert not batcher._engine.has_work
        assert reading.last.usage.completion_tokens < 30


@on_virtual_time
async def test_a_stop_string_is_kept_when_asked_for(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of("abcDEF and more")) as small:
        reading = await small.say("go", stop=("DEF",), include_stop=True)
        assert (reading.text, reading.reasons) == ("abcDEF", ["stop"])


@on_virtual_time
async def test_what_was_held_back_for_a_stop_string_comes_at_the_end(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of("all is DE")) as small:
        assert (await small.say("go", stop=("DEF",))).text == "all is DE"


# ------------------------------------------------------------------ refusals


def model_error(small: SmallTree) -> OpenTurn:
    return small.opening("hi", model="huge")


def too_long(small: SmallTree) -> OpenTurn:
    return small.opening("x" * CONTEXT_LENGTH)


def too_much(small: SmallTree) -> OpenTurn:
    return small.opening("hi", max_tokens=CONTEXT_LENGTH - 2)


def blocked(small: SmallTree) -> OpenTurn:
    return small.opening("give me forbidden fruit")


def surrogate(small: SmallTree) -> OpenTurn:
    return small.opening("hi", params=SamplingParams(10, logit_bias=((257, -100.0),)))


@pytest.mark.parametrize(
    ("make", "status", "param", "code"),
    [
        (model_error, 404, "model", "model_not_found"),
        (too_long, 400, "messages", "context_length_exceeded"),
        (too_much, 400, "messages", "context_length_exceeded"),
        (blocked, 400, "messages", "content_policy_violation"),
        (surrogate, 400, "logit_bias", ""),
    ],
)
@on_virtual_time
async def test_a_refused_turn_holds_and_costs_nothing(
    make: object, status: int, param: str, code: str, tmp_path: Path
) -> None:
    async with small_tree(tmp_path) as small:
        reading = small.reader(make(small))  # type: ignore[operator]
        await reading.run()
        error = reading.refused.error
        assert (error.status, error.param, error.code) == (status, param, code)
        await trio.sleep(1)
        assert small.books.reserved == {}
        assert small.books.charges == {}
        assert (await small.say("hi")).text == "You said: hi"


@on_virtual_time
async def test_a_prompt_of_the_context_minus_one_works(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        overhead = (await small.say("")).opened.prompt_tokens
        reading = await small.say("x" * (CONTEXT_LENGTH - 1 - overhead))
        assert reading.opened.prompt_tokens == CONTEXT_LENGTH - 1
        assert (reading.text, reading.reasons) == ("Y", ["length"])


@on_virtual_time
async def test_the_limiters_refusal_is_handed_on(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        error = ErrorBody(429, "requests", "slow down", "", "rate_limit_exceeded", (("Retry-After", "1"),))
        small.books.refusal = error
        assert (await small.say("hi")).refused == TurnRefused(error)


@pytest.mark.parametrize("missing", ["limiter", "safety.0", "router"])
@on_virtual_time
async def test_an_actor_that_stays_down_means_503_and_nothing_held(missing: str, tmp_path: Path) -> None:
    async with small_tree(tmp_path, leave_out=(missing,)) as small:
        assert (await small.say("hi")).refused.error.status == 503
        await small.start(missing)
        await trio.sleep(1)
        assert small.books.reserved == {}
        assert (await small.say("hi")).text == "You said: hi"


@pytest.mark.parametrize("late", ["limiter", "safety.0", "router", "batcher.0", "ledger"])
@on_virtual_time
async def test_admission_waits_for_an_actor_that_is_just_starting(late: str, tmp_path: Path) -> None:
    async with small_tree(tmp_path, leave_out=(late,)) as small, trio.open_nursery() as nursery:

        async def start_later() -> None:
            await trio.sleep(1)
            await small.start(late)

        nursery.start_soon(start_later)
        reading = await small.say("hi")
        assert reading.refused is None
        assert reading.text == "You said: hi"


# ------------------------------------------------------------------ output verdicts


@on_virtual_time
async def test_a_blocked_phrase_ends_the_choice_and_none_of_it_goes_out(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of("eat the forbidden fruit " + ALL_DAY)) as small:
        reading = await small.say("go")
        assert "forbidden" not in reading.text
        assert "eat the ".startswith(reading.text)
        assert reading.reasons == ["content_filter"]
        assert isinstance(reading.last, TurnDone)
        await trio.sleep(1)
        charged = small.books.tokens_of("turn-1")[0]
        assert charged == reading.last.usage.completion_tokens
        assert charged < 100
        assert not small.tree._running["batcher.0"].runtime.actor._engine.has_work


@on_virtual_time
async def test_text_waits_for_its_checker_and_fails_closed_without_one(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(ALL_DAY)) as small:
        reading = small.reader(small.opening("go"))
        await reading.open()
        await until(reading, 5)
        await small.tree.kill("safety.0")
        await reading.finish()
        assert isinstance(reading.last, TurnFailed)
        assert reading.last.error.status == 503
        await trio.sleep(1)
        assert small.books.reserved == {}
        record = await small.edge.ask("session.0", ReadTurn("turn-1", "acme"), timeout=5)
        assert record.status == "failed"
        assert small.books.tokens_of("turn-1")[0] >= len(reading.text)


@on_virtual_time
async def test_the_fallback_checks_when_no_replica_is_up(tmp_path: Path) -> None:
    async with small_tree(tmp_path, leave_out=("safety.0",)) as small:
        await small.start("safety_fallback")
        assert (await small.say("hi")).text == "You said: hi"


@on_virtual_time
async def test_a_dead_checker_is_replaced_without_the_client_noticing(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of("y" * 300)) as small:
        reading = small.reader(small.opening("go"))
        await reading.open()
        await until(reading, 5)
        await small.restart("safety.0")
        await reading.finish()
        assert reading.text == "y" * 300


# ------------------------------------------------------------------ ending early


@on_virtual_time
async def test_a_reader_that_is_gone_ends_the_turn_after_the_grace(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(ALL_DAY * 2)) as small:
        reading = small.reader(small.opening("go"))
        await reading.open()
        await until(reading, 5)
        began = trio.current_time()
        await small.edge.tell("session.0", Leave("turn-1"))
        record = None
        while record is None or record.status == "in_progress":
            await trio.sleep(0.1)
            record = await small.edge.ask("session.0", ReadTurn("turn-1", "acme"), timeout=5)
        assert record.status == "incomplete"
        assert 9.9 <= trio.current_time() - began <= 10.5
        await trio.sleep(1)
        assert record.texts[0].startswith(reading.text)
        assert small.books.tokens_of("turn-1") == {0: record.usage.completion_tokens}
        assert small.books.reserved == {}
        assert not small.tree._running["batcher.0"].runtime.actor._engine.has_work


@on_virtual_time
async def test_a_reader_that_comes_back_within_the_grace_gets_the_rest(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(ALL_DAY)) as small:
        reading = small.reader(small.opening("go"))
        await reading.open()
        await until(reading, 5)
        await small.edge.tell("session.0", Leave("turn-1"))
        await trio.sleep(8)
        await reading.attach()
        await reading.finish()
        assert reading.text == ALL_DAY


@on_virtual_time
async def test_a_background_turn_goes_on_without_a_reader(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(ALL_DAY)) as small:
        reading = small.reader(small.opening("go", background=True))
        await reading.open()
        await small.edge.tell("session.0", Leave("turn-1"))
        await trio.sleep(60)
        record: TurnRecord = await small.edge.ask("session.0", ReadTurn("turn-1", "acme"), timeout=5)
        assert (record.status, record.texts, record.finish_reasons) == ("completed", (ALL_DAY,), ("stop",))
        assert record.background


@on_virtual_time
async def test_a_cancelled_turn_keeps_and_bills_what_it_received(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(ALL_DAY)) as small:
        reading = small.reader(small.opening("go"))
        await reading.open()
        await until(reading, 5)
        cancel = CancelTurn("turn-1", "acme")
        assert await small.edge.ask("session.0", cancel, timeout=5) == TurnCancelled("turn-1")
        await reading.finish()
        assert isinstance(reading.last, TurnFailed)
        assert reading.last.error.code == "turn_cancelled"
        record = await small.edge.ask("session.0", ReadTurn("turn-1", "acme"), timeout=5)
        assert (record.status, record.texts) == ("cancelled", (reading.text,))
        await trio.sleep(1)
        assert small.books.tokens_of("turn-1") == {0: record.usage.completion_tokens}
        assert small.books.reserved == {}
        assert await small.edge.ask("session.0", cancel, timeout=5) == TurnCancelled("turn-1")


@on_virtual_time
async def test_a_turn_ends_at_its_deadline(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(ALL_DAY)) as small:
        began = trio.current_time()
        reading = await small.say("go", deadline=3.0)
        assert reading.last.error.code == "deadline_exceeded"
        assert 2.9 <= trio.current_time() - began <= 3.5
        assert small.books.reserved == {}


@on_virtual_time
async def test_an_edge_that_gives_up_before_the_turn_opens_leaves_nothing(tmp_path: Path) -> None:
    async with small_tree(tmp_path, leave_out=("router",)) as small:
        with trio.move_on_after(1):
            await small.reader(small.opening("go")).open()
        await trio.sleep(1)
        assert small.books.reserved == {}
        assert await small.edge.ask("session.0", LiveTurns(("turn-1",)), timeout=5) == LiveTurnList(())


# ------------------------------------------------------------------ one bad turn


@on_virtual_time
async def test_a_bug_in_one_turn_ends_that_turn_alone(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of("z" * 200)) as small:
        good = small.reader(small.opening("go"))
        bad = small.reader(small.opening("go"), small.tree.client("edge.1"))
        await good.open()
        await bad.open()

        def breaks(_: object) -> str:
            raise RuntimeError("a planted bug")

        turn = small.tree._running["session.0"].runtime.actor._turns["turn-2"]
        turn.choices[0].text.detokenizer.push = breaks
        await bad.finish()
        await good.finish()
        assert bad.last == TurnFailed(len(bad.events), ErrorBody(500, "server_error", bad.last.error.message))
        assert good.text == "z" * 200
        assert small.books.reserved == {}


# ------------------------------------------------------------------ owners


@on_virtual_time
async def test_anothers_turn_is_not_there(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(ALL_DAY)) as small:
        reading = small.reader(small.opening("go"))
        await reading.open()
        missing = await small.edge.ask("session.0", ReadTurn("no-such", "acme"), timeout=5)
        for message in (
            Attach("turn-1", "other", 0),
            CancelTurn("turn-1", "other"),
            ReadTurn("turn-1", "other"),
            small.opening("go", request_id="turn-1", owner="other"),
        ):
            reply = await small.edge.ask("session.0", message, timeout=5)
            assert isinstance(reply, TurnRefused)
            assert reply.error.status == 404
            assert reply.error.message == missing.error.message.replace("no-such", "turn-1")
        await reading.finish()
        assert reading.text == ALL_DAY


# ------------------------------------------------------------------ slow readers


@on_virtual_time
async def test_a_slow_reader_slows_nobody_and_catches_up(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(ALL_DAY), window_bytes=2000) as small:
        slow = small.reader(small.opening("go"))
        slow.consumes = False
        await slow.open()
        other = small.reader(small.opening("go"), small.tree.client("edge.1"))
        await other.run()
        assert other.text == ALL_DAY
        for message, _ in slow.client.received():
            await slow.hear(message)
        assert 0 < len(slow.text) < 200
        record = await small.edge.ask("session.0", ReadTurn("turn-1", "acme"), timeout=5)
        assert record.texts == (ALL_DAY,)
        slow.consumes = True
        await slow.confirm()
        await slow.finish()
        assert slow.text == ALL_DAY


# ------------------------------------------------------------------ figures


@on_virtual_time
async def test_figures_say_that_no_check_was_skipped(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        await small.say("hi")
        await trio.sleep(1)
        metrics: Metrics = await small.edge.ask("session.0", ReadMetrics(), timeout=5)
        assert 'antiphon_session_safety_check_skipped_total{actor="session.0"} 0' in metrics.lines
        assert 'antiphon_session_turns_completed_total{actor="session.0"} 1' in metrics.lines
        assert 'antiphon_session_turns_open{actor="session.0"} 0' in metrics.lines
        batcher: Metrics = await small.edge.ask("batcher.0", ReadMetrics(), timeout=5)
        assert 'antiphon_generation_tokens_total{actor="batcher.0",model_name="small"} 12' in batcher.lines
        assert 'antiphon_num_requests_running{actor="batcher.0",model_name="small"} 0' in batcher.lines


@on_virtual_time
async def test_every_role_reaches_the_model(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        messages = (ChatMessage("system", "be brief"), ChatMessage("user", "one"), ChatMessage("user", "two"))
        assert (await small.say("", messages=messages)).text == "You said: two"


@on_virtual_time
async def test_leaving_after_the_end_changes_nothing(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        await small.say("hi")
        await small.edge.tell("session.0", Leave("turn-1"))
        await trio.sleep(30)
        record = await small.edge.ask("session.0", ReadTurn("turn-1", "acme"), timeout=5)
        assert record.status == "completed"


@on_virtual_time
async def test_to_start_and_stop_at_once_is_no_free_use(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        small.pace = 1.0
        await small.restart("batcher.0")
        reading = small.reader(small.opening("a long question"))
        await reading.open()
        await small.edge.ask("session.0", CancelTurn("turn-1", "acme"), timeout=5)
        await reading.finish()
        await trio.sleep(5)
        (charge,) = small.books.charges["turn-1"]
        assert (charge.prompt_tokens, charge.spans) == (reading.opened.prompt_tokens, ())
        assert small.books.reserved == {}


@on_virtual_time
async def test_after_an_abort_the_place_is_free_at_once(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(ALL_DAY)) as small:
        for _ in range(5):
            reading = small.reader(small.opening("go"))
            await reading.open()
            await until(reading, 3)
            cancel = CancelTurn(reading.request_id, "acme")
            await small.edge.ask("session.0", cancel, timeout=5)
            await reading.finish()
            assert small.books.reserved == {}
        assert small.books.max_open == 1


@on_virtual_time
async def test_no_reply_is_ever_paired_with_anothers_request(tmp_path: Path) -> None:
    async with small_tree(tmp_path) as small:
        edges = [small.tree.client(f"edge.{n}") for n in range(1, 9)]

        async def chat(number: int, edge: Client) -> None:
            for attempt in range(12):
                said = f"{number} and {attempt} " * 3
                reading = small.reader(small.opening(said), edge)
                await reading.open()
                if (number + attempt) % 3:
                    await trio.sleep(0.05 * attempt)
                    cancel = CancelTurn(reading.request_id, "acme")
                    await edge.ask("session.0", cancel, timeout=5)
                await reading.finish()
                assert f"You said: {said}".startswith(reading.text)

        async with trio.open_nursery() as nursery:
            for number, edge in enumerate(edges):
                nursery.start_soon(chat, number, edge)
        await trio.sleep(5)
        assert small.books.reserved == {}
        assert len(small.books.charges) == 8 * 12


@on_virtual_time
async def test_two_readers_of_one_turn_at_one_edge_are_told_apart(tmp_path: Path) -> None:
    async with small_tree(tmp_path, script_of(ALL_DAY)) as small:
        first = small.reader(small.opening("go"))
        await first.open()
        await until(first, 5)
        await small.edge.ask("session.0", Attach("turn-1", "acme", 0, "second"), timeout=5)
        heard: dict[str, list[int]] = {"turn-1": [], "second": []}
        while len(heard["second"]) < 20:
            message, _ = await small.edge.receive()
            heard[message.reader] += [event.sequence for event in message.events]
        assert heard["second"] == list(range(1, len(heard["second"]) + 1))
        assert heard["turn-1"][0] == len(first.events) + 1
