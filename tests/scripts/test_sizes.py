"""Sizes of the engine that cannot work with the model are refused, and what limits requests is said."""

import pytest
from attrs import evolve

from gpu import engine
from gpu.kernels.cuda_cards import Card
from gpu.model_config import ModelConfig
from scripts.config import Config
from scripts.engines import Chosen
from scripts.failure import UsageFault
from scripts.sizes import MOST_ON_A_PROCESSOR, check_sizes

SHAPE = ModelConfig("llama", 32, 4096, 14336, 32, 8, 128, 64, 8192, 1e-5, 1e4, "halves")
"""A token of it takes 32 layers x 2 x 8 heads x 128 x 2 bytes: 128 KiB; eight are a MiB."""
HOST = Chosen("host")
CUDA = Chosen("cuda", (Card(0, "GPU-a", "NVIDIA H100", 81559, (9, 0), "580.1"),))


def test_a_step_on_a_processor_keeps_a_token_for_prefill():
    assert MOST_ON_A_PROCESSOR == engine.TOKEN_BUDGET - 1
    assert check_sizes(Config(max_batch=255), HOST, SHAPE) == ""
    with pytest.raises(UsageFault, match="max_batch is 256: on a processor it must be 255 at most"):
        check_sizes(Config(max_batch=256), HOST, SHAPE)
    assert check_sizes(Config(max_batch=256), CUDA, SHAPE) == ""
    assert check_sizes(Config(max_batch=256, kv_mib=1), Chosen("scripted"), SHAPE) == ""


@pytest.mark.parametrize("chosen", [HOST, CUDA], ids=["host", "cuda"])
def test_a_pool_too_small_for_a_conversation_is_refused_with_what_is_needed(chosen):
    with pytest.raises(
        UsageFault, match=r"kv_mib is 127: that holds 1008 tokens .* give 128 or more for 1024"
    ):
        check_sizes(Config(kv_mib=127), chosen, SHAPE)
    said = check_sizes(Config(kv_mib=128), chosen, SHAPE)
    assert said == "with kv_mib 128 a request may have 1024 tokens; kv_mib 1024 holds the model's 8192"


def test_a_pool_that_holds_the_context_needs_no_word():
    assert check_sizes(Config(kv_mib=1023), HOST, SHAPE) != ""
    assert check_sizes(Config(kv_mib=1024), HOST, SHAPE) == ""
    assert check_sizes(Config(), HOST, SHAPE) == ""
    short = evolve(SHAPE, context_length=200)
    assert check_sizes(Config(kv_mib=26), HOST, short) == ""
    with pytest.raises(UsageFault, match="give 26 or more for 200 tokens"):
        check_sizes(Config(kv_mib=24), HOST, short)
