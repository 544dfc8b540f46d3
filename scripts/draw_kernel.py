"""Draws docs/kernel-4096.png from benchmarks/results/h200x2-kernel-4096.json, as `tokenweave bench kernel --plot` does. Needs matplotlib.

python scripts/draw_kernel.py [RESULT.json PICTURE]     # another result, another picture
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenweave.bench.kernel.plots import plot_kernel

ROOT = Path(__file__).parent.parent
RESULT, PICTURE = ROOT / "benchmarks" / "results" / "h200x2-kernel-4096.json", ROOT / "docs" / "kernel-4096.png"


def main() -> None:
    result, picture = (Path(word) for word in sys.argv[1:3]) if len(sys.argv) > 1 else (RESULT, PICTURE)
    plot_kernel(json.loads(result.read_text(encoding="utf-8")), picture)


if __name__ == "__main__":
    main()
