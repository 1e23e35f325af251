"""What the shell scripts ask of the machine before any Python of ours runs."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASH = shutil.which("bash")


@pytest.mark.skipif(BASH is None, reason="no bash here")
@pytest.mark.parametrize(
    ("nvidia_smi", "found"),
    [
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-5a1f)'", True),
        ('for i in $(seq 5000); do echo "GPU $i: NVIDIA H100 (UUID: GPU-$i)"; done', True),
        ("echo 'No devices were found'; exit 6", False),
        ("echo 'No devices were found'", False),
        ("echo 'NVIDIA-SMI has failed' >&2; exit 9", False),
        (None, False),
    ],
)
def test_a_gpu_is_what_nvidia_smi_lists(tmp_path, nvidia_smi, found):
    if nvidia_smi is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!{BASH}\n{nvidia_smi}\n")
        tool.chmod(0o755)
    for needed in ("grep", "seq"):
        (tmp_path / needed).symlink_to(shutil.which(needed))
    script = "set -euo pipefail; . scripts/set_up.sh; if has_gpu; then echo yes; fi"
    done = subprocess.run(
        [BASH, "-c", script],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout == "yes\n") is found
