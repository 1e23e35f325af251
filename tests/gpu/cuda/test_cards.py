"""The list of a machine's cards."""

import stat

import pytest

from gpu.kernels.cuda_cards import Card, allowed_cards, list_cards, parse_cards

LISTING = """\
0, GPU-5a1f, NVIDIA H200, 143771, 9.0, 580.65.06
1, GPU-77c2, Tesla T4, 15360, 7.5, 570.86
Unable to determine the device handle for GPU0000:41:00.0: GPU is lost.
3, GPU-90ab, NVIDIA L4, 23034, [N/A], 580.65.06
"""


def test_a_card_is_known_by_its_uuid_and_used_from_capability_8_on():
    h200, t4 = parse_cards(LISTING)
    assert h200 == Card(0, "GPU-5a1f", "NVIDIA H200", 143771, (9, 0), "580.65.06")
    assert h200.is_usable
    assert not t4.is_usable
    assert (h200.has_driver, t4.has_driver) == (True, False)


def tool_that(tmp_path, monkeypatch, script):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")


def test_asks_the_tool(tmp_path, monkeypatch):
    tool_that(tmp_path, monkeypatch, "echo '0, GPU-1, NVIDIA A100-SXM4-40GB, 40960, 8.0, 580.1'")
    assert [card.name for card in list_cards({})] == ["NVIDIA A100-SXM4-40GB"]
    assert list_cards({"CUDA_VISIBLE_DEVICES": ""}) == ()


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ("1,0", ["GPU-b1", "GPU-a0"]),
        ("GPU-b2, GPU-a", ["GPU-b2", "GPU-a0"]),
        ("GPU-b", []),  # two begin so
        ("0,0", ["GPU-a0"]),
        ("0,-1,1", ["GPU-a0"]),
        ("0,7,1", ["GPU-a0"]),
        ("NoDevFiles", []),
    ],
)
def test_cuda_s_own_variable_bounds_what_is_used(entries, found):
    cards = [
        Card(i, uuid, "L4", 23034, (8, 9), "590") for i, uuid in enumerate(("GPU-a0", "GPU-b1", "GPU-b2"))
    ]
    assert [card.uuid for card in allowed_cards(cards, entries.split(","))] == found


def test_a_tool_that_fails_or_is_not_there_means_no_cards(tmp_path, monkeypatch):
    tool_that(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed'; exit 9")
    assert list_cards({}) == ()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert list_cards({}) == ()
