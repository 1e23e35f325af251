"""Every kernel compiles for the cards CI builds for, with no GPU and no driver."""

import re
import sys

import pytest

from gpu.cache import cache_directory
from gpu.kernels import cubin
from gpu.kernels.cuda_step import ARRAYS, COUNTS


def has_compiler():
    try:
        return bool(cubin.compiler_version())
    except cubin.KernelBuildError:
        return False


needs_nvrtc = pytest.mark.skipif(not has_compiler(), reason="no CUDA compiler here: cubins cannot be built")
STEMS = [source.stem for source in cubin.sources()]

SPILL_LIMIT = 64
"""Bytes. A kernel that is bound by the matrix units may keep a little in local memory; none may keep much."""


@needs_nvrtc
@pytest.mark.parametrize("architecture", cubin.ARCHITECTURES)
@pytest.mark.parametrize("stem", STEMS)
def test_builds_and_spills_next_to_nothing(stem, architecture):
    built = cubin.build(stem, architecture, cache_directory() / "cubins")
    assert built.read_bytes()[:4] == b"\x7fELF"
    report = cubin.resources(built)
    assert report
    for kernel in report:
        assert kernel.architecture == architecture
        assert 0 < kernel.registers <= 255
        assert kernel.spill_stores <= SPILL_LIMIT


@needs_nvrtc
def test_what_was_built_is_not_built_again(tmp_path, monkeypatch):
    first = cubin.build("add_norm", "sm_90", tmp_path)
    monkeypatch.setattr(cubin, "_compile", None)
    assert cubin.build("add_norm", "sm_90", tmp_path) == first
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".cubin", ".log"]


@needs_nvrtc
def test_an_error_names_the_file_the_card_and_the_line(tmp_path, monkeypatch):
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void broken() { nonsense; }\n')
    monkeypatch.setattr(cubin, "FOLDER", tmp_path)
    with pytest.raises(cubin.KernelBuildError, match=r"(?s)broken\.cu for sm_80.*broken\.cu\(1\): error"):
        cubin.build("broken", "sm_80", tmp_path)


def test_without_the_compiler_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(cubin.KernelBuildError, match=r"pip install .antiphon\[gpu\]"):
        cubin.build("add_norm", "sm_90", tmp_path)


def test_a_change_to_a_header_or_the_card_is_another_cubin(tmp_path, monkeypatch):
    source = tmp_path / "kernel.cu"
    source.write_text("int x;")
    monkeypatch.setattr(cubin, "FOLDER", tmp_path)
    digests = {cubin.source_digest(source, "sm_80", "13.0"), cubin.source_digest(source, "sm_90", "13.0")}
    digests.add(cubin.source_digest(source, "sm_80", "13.1"))
    (tmp_path / "header.cuh").write_text("int y;")
    digests.add(cubin.source_digest(source, "sm_80", "13.0"))
    assert len(digests) == 4


def test_the_words_of_a_step_have_one_order_on_both_sides():
    text = (cubin.FOLDER / "step.cuh").read_text()
    names = re.findall(r"^    STEP_(\w+),", text, re.MULTILINE)
    assert [name.lower() for name in names] == [*COUNTS, *ARRAYS, "header"]
