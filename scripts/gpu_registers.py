"""`python -m scripts.gpu_registers`: what each kernel takes of a multiprocessor, as a table; needs no GPU."""

from __future__ import annotations

from pathlib import Path

from gpu.cache import cache_directory
from gpu.kernels.cubin import ARCHITECTURES, Resources, build, resources, sources

TARGET = Path(__file__).parents[1] / "docs" / "benchmarks" / "gpu_registers.md"
HEAD = """\
# Registers and spills

What the assembler reports for every kernel, made with `python -m scripts.gpu_registers` on a machine without a GPU.
A multiprocessor has 65,536 registers: 64 a thread let 1,024 threads run at once, 255 let 256. Spills are bytes a
thread keeps in local memory instead (stores/loads).

"""


def table() -> str:
    """One row a kernel, one pair of columns an architecture."""
    found: dict[tuple[str, str], dict[str, Resources]] = {}
    for source in sources():
        for architecture in ARCHITECTURES:
            for kernel in resources(build(source.stem, architecture, cache_directory() / "cubins")):
                found.setdefault((source.name, kernel.kernel), {})[architecture] = kernel
    titles = "".join(f" {name} registers | spills |" for name in ARCHITECTURES)
    lines = [f"| file | kernel |{titles}", "| --- | --- |" + " ---: | ---: |" * len(ARCHITECTURES)]
    for (file, name), by_architecture in sorted(found.items()):
        cells = (by_architecture[architecture] for architecture in ARCHITECTURES)
        figures = "".join(f" {cell.registers} | {cell.spill_stores}/{cell.spill_loads} |" for cell in cells)
        lines.append(f"| {file} | {name} |{figures}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(HEAD + table())
    print(f"wrote {TARGET}")
