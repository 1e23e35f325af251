"""`python -m gpu.kernels.cuda_probe`: whether CUDA can use the card this process sees. Its fault goes to stdout.

A process of its own, because it holds the card while it looks, and because a broken driver may take it along.
"""

from __future__ import annotations

import sys

from gpu.cache import cache_directory
from gpu.errors import EngineError
from gpu.kernels.cubin import compiler_version
from gpu.kernels.cuda_device import CupyDevice


def main() -> int:
    """Return 0 where there are a card, CuPy and the compiler; else print one line and return 1."""
    try:
        compiler_version()
        device = CupyDevice(cache_directory() / "cubins")
        with device.active():
            device.memory()
        device.close()
    except EngineError as error:
        sys.stdout.write(" ".join(str(error).split()) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
