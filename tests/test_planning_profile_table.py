"""The file of measured times: what it keeps, and what is refused."""

import dataclasses
import json
import os
import threading

import pytest

from tokenweave.errors import ProfileError
from tokenweave.planning.profile_points import KINDS, CollectivePoint, GemmPoint, OverheadPoint, StepPoint
from tokenweave.planning.profile_table import Table, parse_table, read_table, table_text, write_table
from tuning_cases import FakePieces, h200, identity_of, setting_of, table_of

SMALL = Table(
    identity_of(),
    {
        GemmPoint("qkv", 64): 5.25,
        StepPoint("woven", 256, 4, 128, 8, 2, "qkv+gate_up", True): 600.0,
        CollectivePoint("alone", 64, 8, 4): 9.5,
        OverheadPoint("kernel"): 1.5,
    },
    {"date": "2026-11-29", "clocks": {"median": 1700}},
)


def test_a_file_gives_back_what_was_measured(tmp_path):
    machine = h200()
    table = table_of(FakePieces(machine, noise=0.1), setting_of(machine), date="today")
    write_table(table, tmp_path / "new" / "table.json")
    read = read_table(tmp_path / "new" / "table.json")
    assert read == table
    assert read.digest == table.digest
    assert {type(point) for point in read.times} == set(KINDS.values())
    assert os.listdir(tmp_path / "new") == ["table.json"], "no temporary files stay"


def test_every_cut_off_file_is_refused():
    text = table_text(SMALL)
    for length in range(len(text) - 1):  # the last character is a line's end
        with pytest.raises(ProfileError, match=r"damaged|no table"):
            parse_table(text[:length], "file")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("5.25", "5.24"),  # a digit
        ('"driver": "580', '"driver": "581'),
        ("132", "133"),
        (" 1.5", " NaN"),
        (" 1.5", " -1.5"),
        ('"complete": true', '"complete": false'),
    ],
)
def test_a_changed_file_is_refused(old, new):
    text = table_text(SMALL)
    assert old in text
    with pytest.raises(ProfileError, match="its content and its digest do not agree"):
        parse_table(text.replace(old, new, 1), "file")


def _resealed(change):
    """A file whose digest is right, with content that is not."""
    from tokenweave.planning import profile_table

    content = json.loads(table_text(SMALL))
    content.pop("digest")
    change(content)
    return json.dumps({**content, "digest": profile_table._digest(content)})


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["times"]["gemm"][0].pop(),
        lambda c: c["times"]["gemm"][0].append(1.0),
        lambda c: c["times"]["gemm"].append(["qkv", "64", 0, None, 1.0]),
        lambda c: c["times"]["gemm"].append(["qkv", True, 0, None, 1.0]),
        lambda c: c["times"]["gemm"].append(["qkv", 64, 0, None, -1.0]),
        lambda c: c["times"]["gemm"].append(["qkv", 64, 0, None, 0.0]),
        lambda c: c["times"]["gemm"].append(["qkv", 64, 0, None, 1e300]),
        lambda c: c["times"]["gemm"].append(["qkv", 0, 0, None, 1.0]),
        lambda c: c["times"]["attention"].append([64, 0, 0, 1.0]),
        lambda c: c["times"]["step"].append(["fused", 64, 0, None, 0, 1.0]),
        lambda c: c["times"]["step"].append(["woven", 64, 4, -1, 4, 1.0]),
        lambda c: c["times"]["gemm"].append(["qkv", 64, 0, None, "fast"]),
        lambda c: c["times"].pop("overhead"),
        lambda c: c["identity"].pop("driver"),
        lambda c: c["identity"].update(extra=1),
        lambda c: c["identity"].update(tp="2"),
        lambda c: c["identity"]["shape"].update(hidden=1.5),
        lambda c: c.pop("info"),
    ],
)
def test_content_of_another_form_is_refused_without_a_traceback(change):
    with pytest.raises(ProfileError, match=r"file: it is damaged: \w+Error: .*; run `tokenweave tune` again"):
        parse_table(_resealed(change), "file")


def test_other_files_are_refused_by_what_they_are(tmp_path):
    for text in ("[]", "{}", '{"format": "gguf"}', '"tokenweave profile"'):
        with pytest.raises(ProfileError, match="no table of measured times"):
            parse_table(text, "file")
    with pytest.raises(ProfileError, match="version 99 of the format, this program reads 3"):
        parse_table(_resealed(lambda c: c.update(version=99)), "file")
    with pytest.raises(ProfileError, match="there is no such file; `tokenweave tune` makes one"):
        read_table(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("binary", "."):
        with pytest.raises(ProfileError, match="cannot be read"):
            read_table(tmp_path / name)


def test_an_interrupted_run_is_refused(tmp_path):
    path = tmp_path / "table.json.partial"
    write_table(dataclasses.replace(SMALL, complete=False), path)
    with pytest.raises(ProfileError, match="was interrupted after 4 points; run `tokenweave tune` again to the end"):
        read_table(path)


@pytest.mark.parametrize(
    ("here", "reason"),
    [
        ({}, None),
        ({"attention": None}, None),
        ({"driver": "590.1"}, "it is stale: measured with driver 580.65.06, here it is 590.1"),
        ({"torch": "2.13.0"}, r"it is stale: measured with torch 2.11.0\+cu130, here it is 2.13.0"),
        ({"cublas": "13.2.0", "nccl": "2.29"}, "it is stale: measured with cublas 13.1.0, .*; measured with nccl"),
        ({"attention": "fa3-fwd 0.0.3"}, "it is stale: measured with attention torch, here it is fa3-fwd 0.0.3"),
        ({"gpu": "NVIDIA H100"}, "it is foreign: measured with gpu NVIDIA H200, here it is NVIDIA H100"),
        ({"tp": 4, "driver": "1.0"}, "it is foreign: measured with tp 2, here it is 4$"),
        ({"transport": "multimem"}, "it is foreign: measured with transport p2p"),
        (
            {"shape": dataclasses.replace(SMALL.identity.shape, hidden=8192, experts=8)},
            r"it is foreign: measured for a model with hidden 4096 \(here 8192\), experts 0 \(here 8\)",
        ),
    ],
)
def test_a_table_serves_the_machine_and_the_model_that_it_was_measured_for(here, reason):
    refusal = SMALL.identity.refusal(identity_of(**here))
    if reason is None:
        assert refusal is None
    else:
        import re

        assert re.search(reason, refusal)


def test_a_newer_driver_replaces_a_table_and_another_model_does_not():
    key = SMALL.identity.key
    assert key.startswith("h200-tp2-")
    assert identity_of(driver="600.1", torch="3.0").key == key
    others = [
        identity_of(tp=4),
        identity_of(transport="multimem"),
        identity_of(gpu="NVIDIA H200 NVL"),
        identity_of(shape=dataclasses.replace(SMALL.identity.shape, head_dim=64)),
    ]
    assert len({key, *(other.key for other in others)}) == 5


def test_who_reads_while_a_table_is_written_sees_the_old_or_the_new_one(tmp_path):
    path = tmp_path / "table.json"
    tables = [dataclasses.replace(SMALL, info={"n": n}) for n in range(2)]
    write_table(tables[0], path)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            for table in tables:
                write_table(table, path)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(100):
            assert read_table(path) in tables
    finally:
        stop.set()
        writer.join()


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot be written"):
        write_table(SMALL, tmp_path / "file" / "table.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ProfileError, match="cannot be written"):
        write_table(SMALL, tmp_path / "folder")
    assert os.listdir(tmp_path / "folder") == []
