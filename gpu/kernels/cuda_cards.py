"""Which cards this machine has, asked without CUDA: a process that only starts others must hold no card."""

from __future__ import annotations

import shutil
import subprocess

from attrs import frozen

LEAST_CAPABILITY = (8, 0)
_QUERY = "uuid,name,memory.total,compute_cap"
_SECONDS = 20


@frozen
class Card:
    """One GPU. `CUDA_VISIBLE_DEVICES=<uuid>` makes it the only one a process sees."""

    uuid: str
    name: str
    memory_mib: int
    capability: tuple[int, int]

    @property
    def is_usable(self) -> bool:
        """Whether the kernels run on it: compute capability 8.0 and up."""
        return self.capability >= LEAST_CAPABILITY


def list_cards() -> tuple[Card, ...]:
    """The cards `nvidia-smi` lists; none where there is no such tool, or where it fails or hangs."""
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
        uuid, name, memory, capability = fields
        major, _, minor = capability.partition(".")
        return Card(uuid, name, int(memory), (int(major), int(minor)))
    except ValueError:
        return None
