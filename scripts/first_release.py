"""A new installation's catalog: some fifty questions about Antiphon itself, built and activated once."""

from __future__ import annotations

import tempfile
from pathlib import Path
