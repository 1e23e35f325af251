"""Which cards this machine has, asked without CUDA: a process that only starts others must hold no card."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from attrs import frozen

LEAST_CAPABILITY = (8, 0)
LEAST_DRIVER = 580
"""Major version of the first NVIDIA driver that runs CUDA 13."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""CUDA's own variable: the cards a process may see, by number or UUID."""
_QUERY = "index,uuid,name,memory.total,compute_cap,driver_version"
_SECONDS = 20


@frozen
class Card:
    """One GPU. `CUDA_VISIBLE_DEVICES=<uuid>` makes it the only one a process sees."""

    index: int
    uuid: str
    name: str
    memory_mib: int
    capability: tuple[int, int]
    driver: str

    @property
    def is_usable(self) -> bool:
        """Whether the kernels run on it: compute capability 8.0 and up."""
        return self.capability >= LEAST_CAPABILITY

    @property
    def has_driver(self) -> bool:
        """Whether the driver runs CUDA 13 by itself; an older one may with NVIDIA's compatibility libraries."""
        return int(self.driver.partition(".")[0]) >= LEAST_DRIVER

    @property
    def words(self) -> str:
        """Everything of it, on one line."""
        major, minor = self.capability
        memory = f"{self.memory_mib / 1024:.0f} GiB"
        words = (
            f"{self.name} ({self.uuid}), {memory}, compute capability {major}.{minor}, driver {self.driver}"
        )
        return words if self.is_usable else f"{words}: too old to be used"


def list_cards(environment: Mapping[str, str] | None = None) -> tuple[Card, ...]:
    """The cards `nvidia-smi` lists and this process may use; none where there is no such tool, or it fails or hangs.

    `CUDA_VISIBLE_DEVICES` in `environment` (default: the process's own) bounds them, as it bounds CUDA.
    """
    listed = _listed()
    allowed = (os.environ if environment is None else environment).get(VISIBLE)
    return listed if allowed is None else allowed_cards(listed, allowed.split(","))


def allowed_cards(cards: Sequence[Card], entries: Sequence[str]) -> tuple[Card, ...]:
    """Those that the variable's entries name, by number or by a UUID's beginning; the first that names none ends it."""
    found: list[Card] = []
    for entry in map(str.strip, entries):
        named = [card for card in cards if _names(entry, card)]
        if len(named) != 1 or named[0] in found:
            break
        found += named
    return tuple(found)


def _names(entry: str, card: Card) -> bool:
    return entry == str(card.index) or (entry.startswith("GPU-") and card.uuid.startswith(entry))


def _listed() -> tuple[Card, ...]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (subprocess.SubprocessError, OSError):
        return ()
    return parse_cards(done.stdout)


def parse_cards(listing: str) -> tuple[Card, ...]:
    """One card a line. A line that is no card, as for one that fell off the bus, is left out."""
    found = (_card([part.strip() for part in line.split(",")]) for line in listing.splitlines())
    return tuple(card for card in found if card is not None)


def _card(fields: list[str]) -> Card | None:
    try:
        index, uuid, name, memory, capability, driver = fields
        major, _, minor = capability.partition(".")
        int(driver.partition(".")[0])
        return Card(int(index), uuid, name, int(memory), (int(major), int(minor)), driver)
    except ValueError:
        return None
