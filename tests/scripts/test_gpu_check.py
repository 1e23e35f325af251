"""`gpu_check` around its measurements: a part that fails costs its own rows, and nothing passes that was not checked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import attrs
import numpy as np
import pytest

from gpu.engine import Engine
from gpu.kernels import MAX_TOP_LOGPROBS, StepResult
from gpu.model_config import ModelConfig
from scripts import gpu_check, gpu_golden, gpu_limits
from scripts.bench import report
from scripts.bench.report import Row
from scripts.gpu_check import Clock
from scripts.gpu_limits import Limits
from scripts.gpu_peers import TransformersPeer, most_sequences, peer_bytes
from scripts.gpu_speed import EIGHT_B, Speed

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


class FakeDevice:
    """A card of so much memory that does nothing."""

    def __init__(self, total=139 * GIB):
        self.total, self.closed = total, 0

    def memory(self):
        return self.total, self.total

    def active(self):
        return nullcontext()

    def close(self):
        self.closed += 1


def failed(rows):
    return [row.name for row in rows if row.value is None and row.note.startswith("failed")]


# The memory checker


@pytest.mark.parametrize(
    ("output", "errors", "why"),
    [
        ("60 passed in 9.1s\n========= ERROR SUMMARY: 0 errors", 0, ""),
        ("60 passed in 9.1s\n========= ERROR SUMMARY: 3 errors", 3, ""),
        ("1 failed, 9 passed in 9.1s\n========= ERROR SUMMARY: 1 error", 1, ""),
        (
            "5 passed in 1s\n===== ERROR SUMMARY: 0 errors\n5 passed in 1s\n===== ERROR SUMMARY: 2 errors",
            2,
            "",
        ),
        ("========= Error: unable to attach to the process", None, "no summary: ========= Error: unable"),
        ("", None, "no summary: it said nothing"),
        ("60 passed in 9.1s", None, "no summary"),
        ("12 failed in 3.2s\n========= ERROR SUMMARY: 0 errors", None, "0 tests passed and 12 failed"),
        (
            "2 failed, 58 passed in 3.2s\n========= ERROR SUMMARY: 0 errors",
            None,
            "58 tests passed and 2 failed",
        ),
        (
            "58 passed, 1 error in 3.2s\n========= ERROR SUMMARY: 0 errors",
            None,
            "58 tests passed and 1 failed",
        ),
        ("60 skipped in 0.2s\n========= ERROR SUMMARY: 0 errors", None, "0 tests passed and 0 failed"),
        ("python: No module named pytest\n========= ERROR SUMMARY: 0 errors", None, "0 tests passed"),
    ],
)
def test_the_memory_checker_passes_only_over_tests_that_ran_and_passed(monkeypatch, output, errors, why):
    monkeypatch.setattr(shutil, "which", lambda _: "compute-sanitizer")
    monkeypatch.setattr(gpu_check, "_run", lambda _: output)
    (row,) = gpu_check._sanitizer()
    assert row.value == errors
    assert why in row.note
    assert bool(failed([row])) is (errors is None)
    assert report.exit_code([row]) == bool(errors)


def test_a_missing_memory_checker_is_said_and_fails_nothing(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    (row,) = gpu_check._sanitizer()
    assert (row.value, failed([row])) == (None, [])
    assert "not here" in row.note


def test_what_takes_too_long_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "SECONDS_A_PART", 2)
    script = f"sleep 60 & echo $! > {tmp_path}/child; wait"
    began = time.monotonic()
    (row,) = gpu_check._part("slow", lambda: gpu_check._run(["bash", "-c", script]))
    assert time.monotonic() - began < 20
    assert "TimeoutExpired" in row.note
    child = int((tmp_path / "child").read_text())
    assert gone(child)


def gone(pid):
    """Whether it ended; a zombie that nobody collects has."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


# Parts


PARTS = (
    "_kernel_tests",
    "_sanitizer",
    "measure_bandwidth",
    "measure_matrix_rate",
    "made_up_rows",
    "golden_rows",
)
LATER = ("_host_time", "_eight_b", "_beside_peer")


@pytest.fixture
def card(monkeypatch):
    """A machine whose every part takes no time and gives one row."""
    device = FakeDevice()
    monkeypatch.setattr(gpu_check, "CupyDevice", lambda _cache: device)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setattr(report, "versions", dict)
    monkeypatch.setattr(report, "machine", dict)
    monkeypatch.setattr(gpu_check, "_describe", lambda _cupy: {"name": "a card"})
    for name in (*PARTS, *LATER):
        value = 1e12 if name.startswith("measure") else [Row(name, 1.0, "")]
        monkeypatch.setattr(gpu_check, name, lambda *_, value=value: value)
    return device


def ran(tmp_path):
    code = gpu_check.main(["--json", str(tmp_path / "report.json")])
    body = json.loads((tmp_path / "report.json").read_text())
    return code, body


def test_memory_goes_back_to_the_card_after_every_part(tmp_path, card):
    code, body = ran(tmp_path)
    assert code == 0
    assert body["gpu"] == {"name": "a card", "finished": True}
    assert len(body["rows"]) == card.closed == len(PARTS) + len(LATER)


def test_so_does_pytorchs_even_from_a_card_that_failed(tmp_path, card, monkeypatch):
    calls = []

    def empty_cache():
        calls.append(True)
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(empty_cache=empty_cache)))
    assert ran(tmp_path)[0] == 0
    assert len(calls) == card.closed


def test_ours_comes_before_the_peer(tmp_path, card):
    assert [row["name"] for row in ran(tmp_path)[1]["rows"]][-2:] == ["_eight_b", "_beside_peer"]


@pytest.mark.parametrize("part", [*PARTS, *LATER])
@pytest.mark.parametrize("error", [RuntimeError("gone\nwrong"), ImportError("no libcublas"), KeyError("key")])
def test_a_part_that_fails_costs_its_own_rows_only(tmp_path, card, monkeypatch, part, error):
    def burst(*_):
        raise error

    monkeypatch.setattr(gpu_check, part, burst)
    code, body = ran(tmp_path)
    assert code == 1
    holes = [row for row in body["rows"] if row["value"] is None]
    assert len(holes) == 1
    assert holes[0]["note"].startswith(f"failed: {type(error).__name__}")
    assert len(body["rows"]) == len(PARTS) + len(LATER)


def test_what_ends_the_process_leaves_the_report_so_far(tmp_path, card, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check, "_eight_b", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ran(tmp_path)
    body = json.loads((tmp_path / "report.json").read_text())
    assert len(body["rows"]) == len(PARTS) + 1
    assert body["gpu"]["finished"] is False


# Limits


def test_without_cublas_and_pytorch_only_the_matrix_rate_and_the_shares_are_missing(
    tmp_path, card, monkeypatch
):
    monkeypatch.undo()
    device = FakeDevice()

    def no_cublas(*_, **__):
        raise ImportError('Failure finding "libcublasLt.so.13"\nlistdir(...)')

    cupy = SimpleNamespace(asarray=np.asarray, empty_like=np.empty_like, dot=no_cublas)
    monkeypatch.setattr(gpu_limits, "MATRIX_SIDE", 4)
    monkeypatch.setattr(gpu_limits.importlib.util, "find_spec", lambda _: None)
    row = gpu_check._limit(
        device, "matrix rate", "TFLOP/s", 1e12, lambda: gpu_limits.measure_matrix_rate(cupy)
    )
    assert row.note == 'failed: ImportError: Failure finding "libcublasLt.so.13"'
    share = gpu_check._share("decode", Limits(1e12, None), Speed(1.0, 1.0, 10, 10), 0.5, 0.75)
    assert (share.value, share.note) == (None, "left out: a limit is missing")
    assert Limits(None, 1.0).seconds(1, 1) is None


@pytest.fixture
def speeds(monkeypatch):
    """Our side, without a card: case → Speed or an error."""
    known = {}
    closed = []
    model = SimpleNamespace(kernels=SimpleNamespace(close=lambda: closed.append(True)))
    monkeypatch.setattr(gpu_check, "make_up", lambda *_: model)
    monkeypatch.setattr(gpu_check, "decoding_step", lambda sequences, context, _: (sequences, context))
    monkeypatch.setattr(gpu_check, "prefill_step", lambda tokens, _: ("prefill", tokens))

    def measured(_model, case, **_):
        found = known.get(case, Speed(0.5, 0.5, 10**12, 1))
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(gpu_check, "measure", measured)
    known["closed"] = closed
    return known


def test_a_case_that_fails_leaves_the_others_their_figures(speeds):
    speeds[64, 512] = RuntimeError("full")
    rates = {}
    rows = gpu_check._eight_b(FakeDevice(), Limits(4e12, 1e15), {(64, 512): (64, 512)}, rates, Clock())
    assert failed(rows) == ["8B-shaped decode, 64 at 512"]
    assert rates.keys() == set(gpu_check.DECODES) - {(64, 512)}
    assert rates[1, 512] == 2
    shares = [row for row in rows if "share" in row.name]
    assert {row.value for row in shares} == {0.5}
    assert all("without a scheduler" in row.name for row in rows if row.unit == "tokens/s")
    assert speeds["closed"]


def test_without_a_limit_the_rates_are_there_all_the_same(speeds):
    rates = {}
    rows = gpu_check._eight_b(FakeDevice(), Limits(4e12, None), {}, rates, Clock())
    assert len(rates) == len(gpu_check.DECODES)
    assert {row.note for row in rows if "share" in row.name} == {"left out: a limit is missing"}
    assert all(row.value for row in rows if row.unit == "tokens/s")


def test_when_the_time_is_up_no_case_is_begun(speeds):
    rates = {}
    rows = gpu_check._eight_b(FakeDevice(), Limits(4e12, 1e15), {}, rates, Clock(seconds=0))
    assert len(failed(rows)) == len(rows) == len(gpu_check.DECODES) + 1
    assert rates == {}


# The peer


def test_the_peer_is_compared_at_the_largest_case_the_card_holds():
    assert 90 * GIB < peer_bytes(EIGHT_B, 256, 2048) < 110 * GIB
    assert gpu_check._comparisons(139 * GIB) == {case: case for case in gpu_check.DECODES}
    on_80 = gpu_check._comparisons(80 * GIB)
    assert (256, 2048) not in on_80
    assert on_80[128, 2048] == (256, 2048)
    assert on_80[256, 512] == (256, 512)
    assert most_sequences(EIGHT_B, 256, 2048, 10 * GIB) == 0
    on_24 = gpu_check._comparisons(24 * GIB)
    assert len(on_24) < len(gpu_check.DECODES)
    assert all(peer_bytes(EIGHT_B, *case) < 0.95 * 24 * GIB for case in on_24)


class FakeTorch:
    """So much of it as the peer uses, and what it holds of the card."""

    bfloat16 = long = "a type"

    def __init__(self):
        self.default, self.log, self.live = "float32", [], 0
        self.fails, self.made_in = [], []
        self.cuda = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: self.log.append(self.live))

    def get_default_dtype(self):
        return self.default

    def set_default_dtype(self, dtype):
        self.default = dtype

    def device(self, _name):
        return nullcontext()

    def inference_mode(self):
        return nullcontext()

    def __call__(self, *_args, **_keywords):
        return Tensor(self)

    randn = zeros = __call__


class Tensor:
    """Counts itself."""

    def __init__(self, torch):
        self.torch = torch
        torch.live += 1

    def __del__(self):
        self.torch.live -= 1

    def __getitem__(self, _):
        return self

    def argmax(self, _):
        return Tensor(self.torch)


@pytest.fixture
def torch(monkeypatch):
    """Both libraries, faked. `fails` are errors, one for each of the next forward passes."""
    made = FakeTorch()

    class Cache:
        def __init__(self):
            self.kept = []

        def update(self, keys, values, _layer):
            self.kept += [keys, values]

    class Model:
        def __init__(self, _shape):
            self.weights = [Tensor(made)]
            made.made_in.append(made.default)

        def eval(self):
            return self

        def __call__(self, input_ids, past_key_values, use_cache):
            self.cycle = past_key_values  # what only the collector frees
            if made.fails:
                raise made.fails.pop()
            return SimpleNamespace(logits=Tensor(made))

    libraries = SimpleNamespace(LlamaConfig=lambda **shape: shape, LlamaForCausalLM=Model, DynamicCache=Cache)
    monkeypatch.setitem(sys.modules, "torch", made)
    monkeypatch.setitem(sys.modules, "transformers", libraries)
    return made


def test_the_peer_gives_back_what_it_took(torch):
    peer = TransformersPeer(EIGHT_B)
    assert torch.made_in == ["a type"]
    assert torch.default == "float32"
    assert peer.rate(8, 512) > 0
    peer.rate(8, 512)
    peer.close()
    assert torch.live == 0
    assert torch.log[-1] == 0
    peer.close()


def test_a_peer_short_of_memory_leaves_a_note_and_runs_the_next_case(torch):
    torch.fails.append(RuntimeError("CUDA out of memory\nmore"))
    cases = {(1, 512): (1, 512), (128, 2048): (256, 2048)}
    rates = dict.fromkeys([*cases, (8, 512)], 100.0)
    rows = gpu_check._beside_peer(cases, rates, Clock())
    by_name = {row.name: row for row in rows}
    first = by_name["8B-shaped decode, 1 at 512: steps, times transformers' forward"]
    assert (first.value, first.note) == (None, "the peer could not: RuntimeError: CUDA out of memory")
    second = by_name["8B-shaped decode, 128 at 2048: steps, times transformers' forward"]
    assert second.value > 0
    assert second.note == "the card cannot hold the peer with 256 at 2048"
    missing = [row.name for row in rows if "with so many" in row.note]
    assert len(missing) == len(gpu_check.DECODES) - 2
    assert torch.live == 0
    assert failed(rows) == []


def test_a_card_too_small_for_the_peer_is_not_asked_to_load_it(torch):
    rows = gpu_check._beside_peer({}, {(1, 512): 1.0}, Clock())
    assert {row.note for row in rows} == {"left out: the card cannot hold the peer with so many"}
    assert torch.made_in == []


def test_a_peer_that_has_changed_fails_by_itself(torch):
    torch.fails.append(TypeError("use_cache is no more"))
    rows = gpu_check._beside_peer(
        {(1, 512): (1, 512), (8, 512): (8, 512)}, {(1, 512): 1.0, (8, 512): 1.0}, Clock()
    )
    assert len(failed(rows)) == 1
    assert sum(row.value is not None for row in rows) == 1


@pytest.mark.parametrize(
    ("rates", "clock", "why"),
    [
        ({}, Clock(), "no rate of ours"),
        ({(1, 512): 1.0}, Clock(seconds=5), "time was up"),
        ({(1, 512): 1.0}, Clock(), "not here"),
    ],
)
def test_a_peer_that_cannot_be_asked_fails_nothing(monkeypatch, rates, clock, why):
    monkeypatch.setitem(sys.modules, "torch", None)
    (row,) = gpu_check._beside_peer({(1, 512): (1, 512)}, rates, clock)
    assert why in row.note
    assert (row.value, failed([row])) == (None, [])


# The golden text


class Echo:
    """A model with a fault of one's choice: its next token is the last one's successor."""

    def __init__(self, fault=False, vocabulary=300):
        self.config = ModelConfig("llama", 1, 32, 32, 1, 1, 32, vocabulary, 4096, 1e-5, 1e4, "halves")
        self.kernels = SimpleNamespace(overlaps=True, close=lambda: None)
        self.fault = fault

    def start(self, batch):
        return batch

    def finish(self, batch):
        rows = batch.logit_rows
        crowded = self.fault and len(batch.sequences) > 4
        chance = -0.5 - batch.positions[rows] * 1e-3 - crowded * 1e-6
        top = np.zeros((len(rows), MAX_TOP_LOGPROBS))
        return StepResult(
            tokens=(batch.tokens[rows] + 1) % self.config.vocab_size,
            logprobs=chance.astype(np.float32),
            top_tokens=top.astype(np.int32),
            top_logprobs=(top + chance[:, None]).astype(np.float32),
            forward_seconds=0.001,
            sampling_seconds=0.0,
            waited_seconds=0.0,
            bytes_moved=0,
        )


@pytest.mark.parametrize("fault", [False, True])
def test_company_is_compared_to_the_last_bit_and_without_a_shared_prefix(monkeypatch, fault):
    tokenizer = SimpleNamespace(
        encode=lambda _text, special: list(range(40)), decode_bytes=lambda _tokens: gpu_golden.GOLDEN.encode()
    )
    monkeypatch.setattr(gpu_golden, "load_tokenizer", lambda _file: tokenizer)
    engine = Engine(Echo(fault), eos_ids=(), blocks=200, max_batch=8, token_budget=256)
    golden, company = gpu_golden.rows_of(engine, Path("model"))
    assert golden.value == 1
    assert company.value == (not fault)
    assert ("log-probabilities are not" in company.note) is fault


def test_a_shared_prefix_proves_nothing(monkeypatch):
    tokenizer = SimpleNamespace(encode=lambda _text, special: list(range(40)), decode_bytes=lambda _: b"\xff")
    monkeypatch.setattr(gpu_golden, "load_tokenizer", lambda _file: tokenizer)
    add = Engine.add
    monkeypatch.setattr(Engine, "add", lambda self, request: add(self, attrs.evolve(request, owner="")))
    engine = Engine(Echo(), eos_ids=(), blocks=200, max_batch=8, token_budget=256)
    golden, company = gpu_golden.rows_of(engine, Path("model"))
    assert golden.value == 0
    assert (company.value, company.note) == (0, "a prefix was shared, which proves nothing")


# The shell


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("has", "sets_up", "code", "said", "ran"),
    [
        ("essentials cublas", True, 0, "", True),  # used as it is
        ("", True, 0, "set up gpu-check,test", True),
        ("essentials", True, 0, "set up gpu-check,test", True),
        ("essentials", False, 0, "shares of the limit are left out", True),
        ("", False, 1, "", False),
    ],
)
def test_an_environment_without_cublas_is_completed_or_used_as_it_is(tmp_path, has, sets_up, code, said, ran):
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "gpu_check", tmp_path / "scripts")
    (tmp_path / "scripts" / "set_up.sh").write_text(
        "has_gpu() { true; }\n"
        f'set_up_environment() {{ {"true" if sets_up else "false"}; echo "set up $1"; }}\n'
    )
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/usr/bin/env bash\n"
        'if [ "$1" = -m ]; then echo checked; exit 0; fi\n'
        f'case "$2" in *cublas*) [[ "{has}" == *cublas* ]];; *) [[ "{has}" == essentials* ]];; esac\n'
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", tmp_path / "scripts" / "gpu_check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert ("checked" in done.stdout) is ran
