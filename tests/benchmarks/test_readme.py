"""README and docs show what docs/results holds, and the gap is computed as the README says."""

import subprocess
import sys
from pathlib import Path

from benchmarks.readme import gaps

ROOT = Path(__file__).parents[2]


def test_tables_agree_with_the_results():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.readme", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_gap_is_against_fp_ft_and_never_the_untuned_model():
    measured = {"base": (3.0, 0.5), "fp_ft": (1.0, 0.0), "rtn": (1.2, 0.1), "qat": (1.05, 0.02)}
    rows = [
        {"scheme": "s", "seed": 0, "method": method, "loss": loss, "kl": kl} for method, (loss, kl) in measured.items()
    ]
    assert abs(gaps(rows, "s", "qat", "loss")[0] - 0.75) < 1e-9
    assert abs(gaps(rows, "s", "qat", "kl")[0] - 0.8) < 1e-9
