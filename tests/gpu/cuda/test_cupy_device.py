"""What `CupyDevice` asks of CuPy, with CuPy's part played by the test: the calls and their order, no card."""

import contextlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from gpu.errors import GpuFailed, GpuFull, ModelError
from gpu.kernels import cuda_device
from gpu.kernels.cuda_device import CupyDevice


class RuntimeFault(Exception):
    def __init__(self, words, status=999):
        super().__init__(words)
        self.status = status


class DriverFault(RuntimeFault):
    pass


class FullError(Exception):
    pass


class FakeArray:
    def __init__(self, said, shape, dtype):
        self.said, self.data = said, np.zeros(shape, dtype)

    def __getitem__(self, index):
        part = FakeArray(self.said, 0, self.data.dtype)
        part.data = self.data[index]
        return part

    def set(self, host, stream=None):
        self.said.append("set" if stream is None else "set on stream")
        self.data[...] = host

    def get(self, stream=None, out=None):
        assert stream is not None
        self.said.append("get")
        out[...] = self.data


class FakeStream(contextlib.nullcontext):
    def __init__(self, said):
        super().__init__()
        self.said = said

    def begin_capture(self):
        self.said.append("begin")

    def end_capture(self):
        self.said.append("end")
        return SimpleNamespace(
            launch=lambda: self.said.append("replay"), upload=lambda _: self.said.append("upload")
        )

    def synchronize(self):
        self.said.append("wait")


class FakeDevice(contextlib.nullcontext):
    compute_capability = "90"
    mem_info = (700, 1000)


def fake_cupy(said, *, capability="90", room=10**9):
    def empty(shape, dtype):
        if np.prod(shape) * np.dtype(dtype).itemsize > room:
            raise FullError("out of memory")
        return FakeArray(said, shape, dtype)

    def module(path):
        said.append(path)
        return SimpleNamespace(
            get_function=lambda name: SimpleNamespace(name=name, max_dynamic_shared_size_bytes=0)
        )

    pool = SimpleNamespace(free_bytes=lambda: 50, free_all_blocks=lambda: said.append("freed"))
    device = FakeDevice()
    device.compute_capability = capability
    return SimpleNamespace(
        empty=empty,
        RawModule=module,
        get_default_memory_pool=lambda: pool,
        get_default_pinned_memory_pool=lambda: pool,
        cuda=SimpleNamespace(
            Device=lambda _: device,
            Stream=lambda non_blocking: FakeStream(said),
            Event=lambda: SimpleNamespace(record=lambda _: said.append("mark")),
            get_elapsed_time=lambda _begin, _end: 3.0,
            alloc_pinned_memory=bytearray,
            memory=SimpleNamespace(OutOfMemoryError=FullError),
            runtime=SimpleNamespace(CUDARuntimeError=RuntimeFault),
            driver=SimpleNamespace(CUDADriverError=DriverFault),
        ),
    )


@pytest.fixture
def said():
    return []


@pytest.fixture
def device(said, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(said))
    monkeypatch.setattr(
        cuda_device, "build", lambda stem, architecture, _cache: f"{stem}-{architecture}.cubin"
    )
    return CupyDevice(tmp_path)


def test_a_cubin_is_built_for_this_card_and_loaded_once(device, said):
    for name in ("linear_bf16_1", "linear_bf16_4"):
        assert device.function("linear_decode", name, 100).name == name
    assert said == ["linear_decode-sm_90.cubin"]


def test_only_a_kernel_that_wants_more_shared_memory_asks_for_it(device):
    assert device.function("a", "small", 48 << 10).max_dynamic_shared_size_bytes == 0
    assert device.function("a", "large", 69632).max_dynamic_shared_size_bytes == 69632


def test_a_step_is_copied_in_without_waiting_and_out_with(device, said):
    staged = device.pinned(8)
    staged[:] = range(8)
    array = device.empty((20,), np.int32)
    device.copy_in(array, staged[:5])
    assert said == ["set on stream"]
    brought = device.pinned(3)
    device.copy_out(brought, array)
    assert said == ["set on stream", "get", "wait"]
    assert brought.tolist() == [0, 1, 2]


def test_a_capture_ends_even_when_a_launch_fails(device, said):
    device.capture(lambda: said.append("launch")).launch()
    assert said == ["begin", "launch", "end", "upload", "replay"]
    said.clear()
    with pytest.raises(ZeroDivisionError):
        device.capture(lambda: 1 // 0)
    assert said == ["begin", "end"]


def test_time_is_the_cards_and_memory_counts_what_the_pool_keeps(device, said):
    device.mark(0)
    device.mark(1)
    assert said == ["mark", "mark"]
    assert device.seconds(0, 1) == 0.003
    assert device.memory() == (750, 1000)


def test_a_full_card_is_a_model_error(said, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(said, room=100))
    device = CupyDevice(tmp_path)
    with pytest.raises(ModelError, match="smaller model"):
        device.empty((101,), np.uint8)


def test_an_old_card_no_card_and_no_cupy_are_each_told(said, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(said, capability="75"))
    with pytest.raises(ModelError, match=r"capability 7\.5; 8\.0 or more"):
        CupyDevice(tmp_path)

    def no_device(_):
        raise RuntimeFault("no CUDA-capable device is detected", 100)

    cupy = fake_cupy(said)
    cupy.cuda.Device = no_device
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(GpuFailed, match="no CUDA-capable device"):
        CupyDevice(tmp_path)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ModelError, match="pip install"):
        CupyDevice(tmp_path)


@pytest.mark.parametrize("fault", [RuntimeFault, DriverFault])
def test_short_memory_may_pass_and_anything_else_of_cuda_does_not(device, fault):
    with pytest.raises(GpuFull, match="memory is full"), device.active():
        raise fault("out of memory", 2)
    with pytest.raises(GpuFailed, match="unspecified launch failure"), device.active():
        raise fault("unspecified launch failure", 719)
    with pytest.raises(ZeroDivisionError), device.active():
        raise ZeroDivisionError


def test_a_graph_there_is_no_memory_for_is_told_from_a_failure(device):
    def fails(status):
        raise RuntimeFault("graph", status)

    with pytest.raises(GpuFull):
        device.capture(lambda: fails(2))
    with pytest.raises(GpuFailed):
        device.capture(lambda: fails(700))


def test_a_card_that_is_gone_can_be_closed(device, monkeypatch):
    def gone(_self):
        raise RuntimeFault("the GPU is lost", 46)

    monkeypatch.setattr(FakeDevice, "__enter__", gone)
    device.close()


def test_close_gives_the_pools_back(device, said):
    device.close()
    assert said == ["freed", "freed"]
