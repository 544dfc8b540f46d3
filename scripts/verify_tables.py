"""Predicts the steps of benchmarks/results/*-verify-*.json anew, from the tuned table beside them, with the planner as it is.

    python scripts/verify_tables.py           # rewrite their "checks", "summary" and "tables"
    python scripts/verify_tables.py --check   # exit 1 if one is out of date

`tokenweave tune --verify` writes such a file; what it measured stays as it is. A file whose table is not kept beside it
(SETUP-tune-MODEL.json for SETUP-verify-MODEL.json) stays as it is altogether.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from generated import command

from tokenweave.models import read_config
from tokenweave.planning import Planner, machine_of
from tokenweave.planning.profile import Profile
from tokenweave.planning.profile_table import read_table
from tokenweave.tuning.verify import SEQUENTIAL, checks, conclusions

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def planner_of(path: Path, model: str, layers: int) -> Planner:
    """With the tuned table, on the GPU that it was measured on."""
    table, config = read_table(path), dataclasses.replace(read_config(model), layers=layers)
    gpu = table.identity.gpu.removeprefix("NVIDIA ").lower()
    machine = machine_of(gpu, table.identity.tp, table.identity.transport)
    return Planner(config, mode="auto", costs=Profile(table, config, machine))


def verified(result: dict[str, Any], planner: Planner) -> dict[str, Any]:
    """The result with what follows from its measurements and the planner."""
    nccl = [
        {"tokens": row["tokens"], "variant": SEQUENTIAL, "ms": row["ms"]}
        for row in result["rows"]
        if row["mode"] == "sequential"
    ]
    measured = result | {"sequential": nccl}
    return {**result, **conclusions(checks(measured, planner), measured)}


def contents() -> dict[Path, str]:
    found = {}
    for path in sorted(RESULTS.glob("*-verify-*.json")):
        table = path.with_name(path.name.replace("-verify-", "-tune-"))
        if table.exists():
            old = json.loads(path.read_text("utf-8"))
            new = verified(old, planner_of(table, old["config"]["model"], old["config"]["layers"]))
            found[path] = json.dumps(new, indent=1) + "\n"
    return found


if __name__ == "__main__":
    sys.exit(command(__doc__, contents))
