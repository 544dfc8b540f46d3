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


def _gemm(*row):
    return lambda c: c["times"]["gemm"].append(list(row))


def _step(**changes):
    """A good row but for ``changes``."""
    row = {"mode": "woven", "tokens": 64, "layers": 4, "split": 32, "ctas": 8, "cluster": 2, "told": "", "late": False}
    return lambda c: c["times"]["step"].append([*{**row, **changes}.values(), 1.0])


@pytest.mark.parametrize("good", [_gemm("qkv", 96, 1.0), _step(), _step(split=None, ctas=0)])
def test_rows_of_the_right_form_are_taken(good):
    """So that what the next test changes in them is what is refused there."""
    assert len(parse_table(_resealed(good), "file").times) == len(SMALL.times) + 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c["times"]["gemm"][0].pop(), r"argument 2 is shorter"),
        (lambda c: c["times"]["gemm"][0].append(1.0), r"argument 2 is longer"),
        (lambda c: c["times"]["gemm"].append(5), "cannot unpack"),
        (_gemm("qkv", "64", 1.0), r"GemmPoint\.rows is '64'"),
        (_gemm("qkv", True, 1.0), r"GemmPoint\.rows is True"),
        (_gemm(None, 64, 1.0), r"GemmPoint\.name is None"),
        (_gemm("qkv", 0, 1.0), r"GemmPoint\.rows is 0; expected 1 to"),
        (_gemm("qkv", 2**63, 1.0), rf"GemmPoint\.rows is {2**63}; expected 1 to {2**31 - 1}"),
        (_gemm("qkv", 10**400, 1.0), r"GemmPoint\.rows is 10{39}; expected 1 to"),
        (_gemm("qkv", 64, -1.0), r"a time of -1\.0 us in gemm"),
        (_gemm("qkv", 64, 0.0), r"a time of 0\.0 us in gemm"),
        (_gemm("qkv", 64, 1e300), r"a time of 1e\+300 us in gemm"),
        (_gemm("qkv", 64, 10**400), r"a time of 10+ us in gemm"),
        (_gemm("qkv", 64, "fast"), r"a time of 'fast' us in gemm"),
        (_gemm("qkv", 64, True), r"a time of True us in gemm"),
        (lambda c: c["times"]["attention"].append([64, 0, 0, 1.0]), r"AttentionPoint\.sequences is 0; expected 1 to"),
        (_step(layers=0), r"StepPoint\.layers is 0; expected 1 to"),
        (_step(split=-1), r"StepPoint\.split is -1; expected 1 to"),
        (_step(ctas=-1), r"StepPoint\.ctas is -1; expected 0 to"),
        (_step(late=0), r"StepPoint\.late is 0"),
        (lambda c: c["times"].pop("overhead"), "'overhead'"),
        (lambda c: c["times"].update(gemm=None), "not iterable"),
        (lambda c: c.update(times=[]), r"times is \[\]; expected an object"),
        (lambda c: c["identity"].pop("driver"), "driver"),
        (lambda c: c["identity"].update(extra=1), "extra"),
        (lambda c: c["identity"].update(tp="2"), r"Identity\.tp is '2'"),
        (lambda c: c.update(identity=None), "identity is None; expected an object"),
        (lambda c: c.update(identity=[["gpu", "x"]]), r"identity is \[.*\]; expected an object"),
        (lambda c: c["identity"]["shape"].update(hidden=1.5), r"Shape\.hidden is 1\.5"),
        (lambda c: c["identity"].update(shape=[1]), r"shape is \[1\]; expected an object"),
        (lambda c: c["identity"].update(shape="big"), "shape is 'big'; expected an object"),
        (lambda c: c["identity"].update(shape=None), "shape is None; expected an object"),
        (lambda c: c.pop("info"), "'info'"),
        (lambda c: c.update(info=[1]), r"info is \[1\]; expected an object"),
    ],
)
def test_content_of_another_form_is_refused_without_a_traceback(change, reason):
    with pytest.raises(
        ProfileError, match=rf"file: it is damaged: \w+Error: .*{reason}.*; run `tokenweave tune` again"
    ):
        parse_table(_resealed(change), "file")


@pytest.mark.parametrize("value", ["1e400", "-1e400", "NaN", "Infinity", "[" * 993 + "]" * 993])
def test_numbers_that_are_none_and_deep_nesting_are_refused_without_a_traceback(value):
    text = table_text(SMALL).replace('"2026-11-29"', value, 1)
    with pytest.raises(ProfileError, match="file: it is damaged"):
        parse_table(text, "file")
    with pytest.raises(ProfileError, match="file: it is damaged"):
        parse_table(table_text(SMALL).replace("5.25", value, 1), "file")


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


def test_a_table_is_written_through_a_link(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "table.json")
    write_table(SMALL, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert read_table(tmp_path / "table.json") == SMALL
