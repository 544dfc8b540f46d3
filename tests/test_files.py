"""Files are written whole, through links, and not over devices."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from fetch_smollm2 import NAME, cache_path

from tokenweave.cache import cache_dir
from tokenweave.files import write_picture, write_result, write_whole


def test_a_file_is_replaced_and_nothing_else_stays(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.txt"
    write_whole(file, "1")
    os.chmod(file, 0o600)
    write_whole(file, "zwei ½")
    assert file.read_text("utf-8") == "zwei ½"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600, "who may read it stays as it was"
    assert os.listdir(file.parent) == ["a.txt"]
    write_whole(tmp_path / ("n" * 255), "the longest name that there is")


def test_a_new_file_follows_the_umask_and_a_file_system_without_modes_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", "1")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refused)
    write_whole(tmp_path / "a", "2")
    assert (tmp_path / "a").read_text() == "2"


def test_a_full_disk_is_told_with_the_files_name_and_leaves_the_file_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"before")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    figure = SimpleNamespace(savefig=lambda stream, dpi, format: stream.write(format.encode()))
    for write in (lambda: write_whole(file, b"now"), lambda: write_picture(file, figure, dpi=20)):
        with pytest.raises(OSError, match=re.escape(f"[Errno 28] No space left on device: '{file}'")):
            write()
    assert file.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["a.png"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "target")
    write_whole(tmp_path / "link", "1")  # a link to nothing yet
    write_whole(tmp_path / "link", "2")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "deep" / "target").read_text() == "2"


def test_a_device_stays_a_device_and_a_pipe_gets_it_all(tmp_path: Path) -> None:
    (tmp_path / "null").symlink_to("/dev/null")
    for path in (Path("/dev/null"), tmp_path / "null"):
        write_result({"a": 1}, path)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert os.listdir(tmp_path) == ["null"]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=write_result, args=({"a": 1}, pipe))
    writer.start()
    assert json.loads(pipe.read_text()) == {"a": 1}
    writer.join()


@pytest.mark.parametrize("to_file", [False, True])
def test_our_own_output_keeps_what_was_printed(tmp_path: Path, to_file: bool) -> None:
    code = (
        "from pathlib import Path; from tokenweave.files import write_whole\n"
        "print('before'); write_whole(Path('/dev/stdout'), 'whole\\n'); print('after')"
    )
    command = [sys.executable, "-c", code]
    if to_file:
        with open(tmp_path / "out", "w") as out:
            subprocess.run(command, stdout=out, check=True, timeout=60)
        text = (tmp_path / "out").read_text()
    else:
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout
    assert text == "before\nwhole\nafter\n"


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    write_whole(file, "old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_what_killed_writers_leave_does_not_pile_up(tmp_path: Path) -> None:
    killed = "import os, signal; os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    code = (
        killed
        + f"from pathlib import Path; from tokenweave.files import write_whole; write_whole(Path({str(tmp_path / 'a')!r}), 'x')"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    (left,) = tmp_path.iterdir()
    write_whole(tmp_path / "b", "another writer, at the same time")
    assert left.exists()
    os.utime(left, (0, 0))
    write_whole(tmp_path / "b", "later")
    assert os.listdir(tmp_path) == ["b"]


def test_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    texts = [str(digit) * 100_000 for digit in range(4)]
    threads = [threading.Thread(target=lambda t=t: [write_whole(tmp_path / "a", t) for _ in range(20)]) for t in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "a").read_text() in texts
    assert os.listdir(tmp_path) == ["a"]


def test_a_cache_may_be_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TOKENWEAVE_CACHE", "~/zz")
    assert cache_dir("kernels") == tmp_path / "zz" / "kernels"
    assert cache_path() == tmp_path / "zz" / NAME
    monkeypatch.delenv("TOKENWEAVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/xdg")
    assert cache_dir("kernels") == tmp_path / "xdg" / "tokenweave" / "kernels"
    assert cache_path() == tmp_path / "xdg" / "tokenweave" / NAME
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir("kernels") == tmp_path / ".cache" / "tokenweave" / "kernels"
    assert cache_path() == tmp_path / ".cache" / "tokenweave" / NAME
