"""The tables of ``benchmarks/sm_budget``, made of a result with times that say where they belong."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks" / "sm_budget"


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("measure", "tables", "green")
    spec = importlib.util.spec_from_file_location("measure", FOLDER / "measure.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "measure", module)
    spec.loader.exec_module(module)
    yield module
    for name in names[1:]:
        sys.modules.pop(name, None)


def test_every_condition_has_its_place_in_a_table(measure):
    conditions, slots = measure.conditions(132), measure.slots(132)
    assert len(set(conditions)) == len(conditions)
    assert len(set(slots)) == len(slots)
    held, shown = [], {}
    for number, how in enumerate(conditions):
        for rows in (512, 1024):
            us = 100.0 if how == measure.Condition() else 1000.0 + number
            held.append({"gemm": "qkv", "rows": rows, **dataclasses.asdict(how), "us": us, "covered": number % 2 == 0})
        shown[how] = f"{'> ' * (number % 2)}{us:.0f} ({us / 100:.2f})"
    result = {
        "config": {
            "sms": 132,
            "usual": measure.USUAL,
            "collective_us_per_1024_rows": {f"{blocks}/{cluster}": 5.0 for blocks, cluster in measure.LAUNCHES},
        },
        "held": held,
        "slots": [
            {"gemm": "qkv", "rows": rows, **dataclasses.asdict(slot), "us": 7.0}
            for slot in slots
            for rows in (512, 1024)
        ],
    }
    tables = measure.tables(result)
    cells = {str(cell) for table in tables.values() for line in table["rows"] for cell in line}
    assert all(len(line) == len(table["columns"]) for table in tables.values() for line in table["rows"])
    missing = [how for how, cell in shown.items() if how.blocks and cell not in cells]
    assert missing == []
    assert [len(tables["sm-budget-fits"][part]) for part in ("columns", "rows")] == [3 + 9, 2]
    assert "sm-budget-order" not in measure.tables({**result, "slots": []})
    assert len(tables["sm-budget-ways"]["rows"]) == len(tables["sm-budget-order"]["rows"]) == 2
    assert len(tables["sm-budget-launches"]["rows"]) == len(measure.LAUNCHES)
    assert tables["sm-budget-targets"]["columns"] == [
        *("GEMM", "rows", "alone"),
        *("none", "128", "124", "120", "116", "112", "104"),
    ]
    assert len(tables["sm-budget-targets"]["rows"]) == 2
