"""Which engine a tree runs: on every GPU that can be used, or on the processor. Said in words a person reads."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Literal

from attrs import frozen

from gpu.errors import ModelError
from gpu.kernels.cpu import describe_cpu
from gpu.kernels.cuda_cards import LEAST_CAPABILITY, LEAST_DRIVER, VISIBLE, Card, list_cards
from gpu.kernels.cuda_geometry import check_shape
from gpu.model_config import ModelConfig
from scripts.failure import UsageFault

ROOT = Path(__file__).parents[1]
PROBE_SECONDS = 60.0
"""A driver that has to start the card first takes some seconds."""
INSTALL_CUPY = './scripts/up installs it, or pip install "antiphon[gpu]"'


@frozen
class Chosen:
    """What runs the model. `cards` has one card for each batcher; it is empty unless `kind` is `cuda`."""

    kind: Literal["host", "cuda", "scripted"]
    cards: tuple[Card, ...] = ()
    note: str = ""
    """Why GPUs that are here are not used."""

    @property
    def words(self) -> str:
        """`2 × NVIDIA H100`, or the processor and what the kernels use of it."""
        if self.kind == "scripted":
            return "a script: no model runs"
        return count_cards(self.cards) if self.cards else _processor()


def choose(wanted: str) -> Chosen:
    """Look at the machine for what the setting `engine` asks for. Raises `UsageFault` where `cuda` cannot be had.

    `auto` takes the GPUs where there is one that can be used, and else the processor.
    """
    if wanted == "scripted":
        return Chosen("scripted")
    if wanted == "host":
        return Chosen("host")
    cards = list_cards()
    usable = tuple(card for card in cards if card.is_usable)
    obstacle = _obstacle(cards, usable)
    if obstacle and wanted == "cuda":
        raise UsageFault(f"engine cuda: {obstacle}; --engine host runs on the processor")
    if not obstacle and wanted == "auto" and not all(card.has_driver for card in usable):
        obstacle = (
            f"its driver {usable[0].driver} is older than {LEAST_DRIVER}; --engine cuda tries all the same"
        )
    if obstacle:
        return Chosen("host", note=f"{count_cards(cards)} not used: {obstacle}" if cards else "")
    return _tried(wanted, usable)


def fit(chosen: Chosen, wanted: str, config: ModelConfig) -> Chosen:
    """Return what runs a model of this shape: `auto` takes the processor for one that the CUDA kernels do not run.

    Raises `UsageFault` where `cuda` was asked for.
    """
    if chosen.kind != "cuda":
        return chosen
    try:
        check_shape(config)
    except ModelError as error:
        if wanted == "cuda":
            raise UsageFault(f"engine cuda: {error}") from error
        return Chosen("host", note=f"{chosen.words} not used: {error}")
    return chosen


def count_cards(cards: tuple[Card, ...]) -> str:
    """Name cards as a person would: `2 × NVIDIA H100, 1 × NVIDIA L4`."""
    return ", ".join(f"{count} × {name}" for name, count in Counter(card.name for card in cards).items())


def cupy_is_here() -> bool:
    """Whether CuPy can be imported. It is not: a process that only starts others must hold no card."""
    return importlib.util.find_spec("cupy") is not None


def try_cards(cards: tuple[Card, ...]) -> dict[Card, str]:
    """Have CUDA open each card, all at once, in processes of their own; return what is wrong with those it cannot."""
    command = [sys.executable, "-m", "gpu.kernels.cuda_probe"]
    looks = {
        card: subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, VISIBLE: card.uuid},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for card in cards
    }
    faults = {card: _fault(look) for card, look in looks.items()}
    return {card: fault for card, fault in faults.items() if fault}


def _fault(look: subprocess.Popen[str]) -> str:
    try:
        said, _ = look.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        look.kill()
        return f"CUDA did not open it within {PROBE_SECONDS:.0f} s"
    return (said.strip() or f"CUDA ended with {look.returncode}") if look.returncode else ""


def _tried(wanted: str, usable: tuple[Card, ...]) -> Chosen:
    """Take the cards that CUDA can open, and name the others."""
    faults = try_cards(usable)
    good = tuple(card for card in usable if card not in faults)
    note = "; ".join(f"{card.name} ({card.uuid}) not used: {fault}" for card, fault in faults.items())
    if not good and wanted == "cuda":
        raise UsageFault(f"engine cuda: {note}; --engine host runs on the processor")
    return Chosen("cuda" if good else "host", good, note)


def _obstacle(cards: tuple[Card, ...], usable: tuple[Card, ...]) -> str:
    """What keeps GPUs from being used; "" where nothing does."""
    if not cards:
        bound = f" within {VISIBLE}={os.environ[VISIBLE]}" if VISIBLE in os.environ else ""
        return f"no GPU here: nvidia-smi lists none{bound}"
    if not usable:
        major, minor = LEAST_CAPABILITY
        return f"compute capability {major}.{minor} or more is needed"
    return "" if cupy_is_here() else f"CuPy is not installed; {INSTALL_CUPY}"


def _processor() -> str:
    cpu = describe_cpu()
    return f"the processor: {cpu.name}, {cpu.isa} kernels"
