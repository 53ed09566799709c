"""Where the committed results are. The source distribution leaves them out: there, tests that read them are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
CURRENT = RESULTS / "current"
NO_RESULTS = "the source distribution has no benchmarks/results"

reads_results = pytest.mark.skipif(not RESULTS.is_dir(), reason=NO_RESULTS)
