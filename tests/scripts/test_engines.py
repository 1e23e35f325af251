"""Which engine is chosen on which machine, and what the tree makes of it; nvidia-smi is played by the test."""

import io
from pathlib import Path

import pytest
from attrs import evolve
from rich.console import Console

from actors.batcher import BatcherSettings
from gpu.kernels import cuda_probe
from gpu.kernels.cuda_cards import Card
from gpu.model_config import ModelConfig
from scripts import doctor, engines, ps
from scripts.config import Config
from scripts.engines import choose, fit
from scripts.failure import UsageFault
from scripts.tree import HOST_BATCH, ServedModel, tree
from supervision import wire
from supervision.status import ActorStatus

H100 = Card(0, "GPU-a", "NVIDIA H100", 81559, (9, 0), "580.1")
OTHER_H100 = evolve(H100, index=1, uuid="GPU-b")
L4 = Card(2, "GPU-c", "NVIDIA L4", 23034, (8, 9), "580.1")
T4 = Card(3, "GPU-d", "Tesla T4", 15360, (7, 5), "580.1")
SHAPE = ModelConfig("llama", 2, 64, 96, 4, 2, 32, 64, 256, 1e-5, 1e4, "halves")
MODEL = ServedModel("small", Path("small.gguf"), 8192, 257, 0)


@pytest.fixture
def machine(monkeypatch):
    """Call it with the cards that are here, whether CuPy is, and what CUDA finds wrong with cards."""

    def with_cards(*cards, cupy=True, faults=()):
        found = dict(faults)
        monkeypatch.setattr(engines, "try_cards", lambda tried: {c: found[c] for c in tried if c in found})
        monkeypatch.setattr(engines, "list_cards", lambda: cards)
        monkeypatch.setattr(engines, "cupy_is_here", lambda: cupy)

    return with_cards


def test_auto_takes_every_card_that_can_be_used(machine):
    machine(H100, OTHER_H100, L4, T4)
    chosen = choose("auto")
    assert (chosen.kind, chosen.cards) == ("cuda", (H100, OTHER_H100, L4))
    assert chosen.words == "2 × NVIDIA H100, 1 × NVIDIA L4"
    assert chosen.note == ""


def test_without_a_card_the_processor_is_named_with_its_kernels(machine):
    machine()
    chosen = choose("auto")
    assert (chosen.kind, chosen.cards, chosen.note) == ("host", (), "")
    assert chosen.words.startswith("the processor: ")
    assert chosen.words.endswith(" kernels")


@pytest.mark.parametrize(
    ("cards", "cupy", "words"),
    [
        ((), True, "no GPU here"),
        ((T4,), True, "compute capability 8.0"),
        ((H100,), False, "CuPy is not installed"),
    ],
)
def test_cuda_that_cannot_be_had_is_refused_and_auto_says_why_it_is_not_used(machine, cards, cupy, words):
    machine(*cards, cupy=cupy)
    with pytest.raises(UsageFault, match=words) as refused:
        choose("cuda")
    assert "\n" not in str(refused.value)
    assert "--engine host" in str(refused.value)
    chosen = choose("auto")
    assert chosen.kind == "host"
    assert (words in chosen.note) is bool(cards)


def test_the_processor_can_be_asked_for_where_there_are_cards(machine):
    machine(H100)
    assert choose("host").cards == ()


def test_an_old_driver_is_named_and_tried_only_when_cuda_is_asked_for(machine):
    old = evolve(H100, driver="550.54.14")
    machine(old)
    chosen = choose("auto")
    assert (chosen.kind, chosen.note[:54]) == (
        "host",
        "1 × NVIDIA H100 not used: its driver 550.54.14 is olde",
    )
    assert choose("cuda").cards == (old,)


def test_a_card_cuda_cannot_open_is_left_out_and_named(machine):
    fault = (OTHER_H100, "CUDA finds no GPU it can use (cudaErrorNoDevice)")
    machine(H100, OTHER_H100, faults=[fault])
    chosen = choose("auto")
    assert chosen.cards == (H100,)
    assert chosen.note == f"NVIDIA H100 (GPU-b) not used: {fault[1]}"
    machine(OTHER_H100, faults=[fault])
    chosen = choose("auto")
    assert (chosen.kind, chosen.cards) == ("host", ())
    assert "cudaErrorNoDevice" in chosen.note
    with pytest.raises(UsageFault, match="cudaErrorNoDevice"):
        choose("cuda")


def test_cards_are_tried_each_in_a_process_that_sees_no_other(monkeypatch, tmp_path):
    probe = tmp_path / "python"
    probe.write_text(
        '#!/bin/sh\n[ "$CUDA_VISIBLE_DEVICES" = GPU-a ] || { echo "lost: $CUDA_VISIBLE_DEVICES"; exit 1; }\n'
    )
    probe.chmod(0o755)
    monkeypatch.setattr(engines.sys, "executable", str(probe))
    assert engines.try_cards((H100, OTHER_H100)) == {OTHER_H100: "lost: GPU-b"}


def test_without_cupy_the_probe_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(cuda_probe, "compiler_version", lambda: "13.0")
    monkeypatch.setitem(engines.sys.modules, "cupy", None)
    assert cuda_probe.main() == 1
    assert capsys.readouterr().out == 'CuPy is not installed: pip install "antiphon[gpu]"\n'


def test_a_model_the_cuda_kernels_do_not_run_goes_to_the_processor_unless_cuda_was_asked_for(machine):
    machine(H100)
    odd = evolve(SHAPE, head_dim=80)
    assert fit(choose("auto"), "auto", SHAPE).kind == "cuda"
    chosen = fit(choose("auto"), "auto", odd)
    assert (chosen.kind, chosen.cards) == ("host", ())
    assert chosen.note.startswith("1 × NVIDIA H100 not used: heads of 80")
    with pytest.raises(UsageFault, match="heads of 80"):
        fit(choose("cuda"), "cuda", odd)
    assert fit(choose("host"), "host", odd).note == ""


def batchers(config, cards=()):
    (group,) = [child for child in tree(config, MODEL, 3, cards).children if child.name == "engines"]
    return {child.name: wire.structure(child.settings, BatcherSettings) for child in group.children}


def test_each_card_gets_a_batcher_of_its_own():
    found = batchers(Config(kv_mib=100), (H100, L4))
    assert {name: (s.engine, s.device, s.device_name) for name, s in found.items()} == {
        "batcher.0": ("cuda", "GPU-a", "NVIDIA H100"),
        "batcher.1": ("cuda", "GPU-c", "NVIDIA L4"),
    }
    assert {(s.model, s.name, s.kv_bytes, s.max_batch) for s in found.values()} == {
        ("small.gguf", "small", 100 << 20, 0)
    }


def test_without_cards_there_is_one_batcher_on_the_processor():
    (only,) = batchers(Config(threads=1)).values()
    assert (only.engine, only.device, only.threads, only.max_batch) == ("host", "", 1, HOST_BATCH)
    (only,) = batchers(Config(engine="scripted", max_batch=5)).values()
    assert (only.engine, only.max_batch) == ("scripted", 5)


def test_doctor_names_cards_and_the_engine_through_the_same_functions(machine, monkeypatch):
    machine(H100, T4)
    monkeypatch.setattr("gpu.kernels.cuda_cards.list_cards", lambda: (H100, T4))
    monkeypatch.setattr(doctor.shutil, "which", lambda tool: f"/bin/{tool}")
    gpus, engine = doctor._gpus(Config()), doctor._engine(Config())
    assert gpus.found == (
        "NVIDIA H100 (GPU-a), 80 GiB, compute capability 9.0, driver 580.1; "
        "Tesla T4 (GPU-d), 15 GiB, compute capability 7.5, driver 580.1: too old to be used"
    )
    assert (engine.state, engine.found) == ("ok", "runs on 1 × NVIDIA H100")
    machine(T4)
    assert doctor._engine(Config()).state == "note"
    assert doctor._engine(Config(engine="cuda")).state == "wrong"


def test_ps_shows_a_last_error_as_it_is():
    words = 'NVIDIA H100 (GPU-a): pip install "antiphon[gpu]"'
    text = io.StringIO()
    Console(width=200, file=text).print(ps._table([ActorStatus("batcher.1", 7, 0, "down", 3, 0, 0.0, words)]))
    assert words in text.getvalue()
