"""Files that engines record to: who may read them, what is in the way, and damaged ones."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.core.plan import ScheduledStep
from jaxpaged.errors import ConfigError
from jaxpaged.record.format import Record
from jaxpaged.record.reader import RecordingError, read_sessions
from jaxpaged.record.recording import Recording

HEADER: Record = {
    "kind": "header",
    "format": 1,
    "versions": {"jaxpaged": "0.1.0"},
    "device": {},
    "settings": {},
    "model": {},
}
STEPPED = {"kind": "stepped", "number": 1}


def record(path: Path, num_steps: int = 1) -> None:
    recording = Recording(str(path))
    recording.begin(HEADER)
    for _ in range(num_steps):
        recording.stepped(idle=False)
    recording.closed()


def write(path: Path, *records: Any, end: str = "\n") -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r, separators=(",", ":")) for r in records]
    path.write_text("\n".join(lines) + end)
    return path


def kinds(path: Path) -> list[list[str]]:
    return [[line.record["kind"] for line in one.lines()] for one in read_sessions(str(path))]


def refused(path: Path) -> str:
    with pytest.raises(RecordingError) as caught:
        kinds(path)
    return str(caught.value)


def test_only_the_user_may_read_a_recording(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.touch(0o644)
    for path in (new, old):
        record(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_second_engine_appends(tmp_path: Path) -> None:
    path = tmp_path / "file"
    record(path, 1)
    record(path, 2)
    assert kinds(path) == [["stepped", "close"], ["stepped", "stepped", "close"]]
    second = read_sessions(str(path))[1]
    assert [line.number for line in second.lines()] == [5, 6, 7]


def test_a_session_after_one_that_was_cut_off(tmp_path: Path) -> None:
    path = write(tmp_path / "file", HEADER, STEPPED, '{"kind":"ste', end="")
    record(path)
    assert kinds(path) == [["stepped"], ["stepped", "close"]]
    assert path.read_text().count("\n") == 6


def test_two_engines_cannot_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    first = Recording(str(path))
    with pytest.raises(ConfigError, match="another engine is recording to this file"):
        Recording(str(path))
    first.stop()
    Recording(str(path)).stop()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("Not to be lost.\n")
    with pytest.raises(ConfigError, match="holds something else than recordings"):
        Recording(str(path))
    assert path.read_text() == "Not to be lost.\n"


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "file"):
        with pytest.raises(ConfigError) as caught:
            Recording(str(path))
        assert str(path) in str(caught.value)


def test_several_processes_cannot_be_recorded() -> None:
    with pytest.raises(ConfigError, match="only an engine of one process can be recorded"):
        EngineConfig(num_processes=2, coordinator="localhost:1", record="file")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_ends_the_recording_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    recording = Recording("/dev/full")
    with caplog.at_level(logging.WARNING, "jaxpaged"):
        recording.begin(HEADER)
        for i in range(3):
            recording.planned(ScheduledStep(i, [], 0, []))
            recording.stepped(idle=True)
        recording.closed()
    assert [record.getMessage() for record in caplog.records] == [
        "Recording to /dev/full has ended: No space left on device. The engine goes on."
    ]


def test_a_plan_is_in_the_file_before_its_step_is_launched(tmp_path: Path) -> None:
    path = tmp_path / "file"
    recording = Recording(str(path))
    recording.begin(HEADER)
    recording.planned(ScheduledStep(0, [], 0, []))
    assert kinds(path) == [["plan"]]
    recording.stop()


# ---------------------------------------------------------------------- reading


def test_a_last_line_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "file", HEADER, STEPPED, STEPPED)
    whole = path.read_bytes()
    for length in range(len(whole) - 2, len(whole) - 30, -7):
        path.write_bytes(whole[:length])
        (session,) = read_sessions(str(path))
        assert [line.record for line in session.lines()] == [STEPPED]
        assert session.cut_off
    path.write_bytes(whole)
    (session,) = read_sessions(str(path))
    assert len(list(session.lines())) == 2
    assert not session.cut_off


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["hello"], "holds no recording"),
        ([STEPPED], "holds no recording"),
        ([json.dumps(HEADER, separators=(",", ":"))[:30]], "line 1: the header is damaged"),
        ([{**HEADER, "format": 2}], "has format 2, and this build reads format 1"),
        ([{**HEADER, "format": 2}], "the version that wrote it (jaxpaged 0.1.0)"),
        ([{**HEADER, "settings": 5}], "line 1: the header has no 'settings'"),
        ([HEADER, "{broken", STEPPED], "line 2: not a record. The file was damaged or edited."),
        ([HEADER, "[1]", STEPPED], "line 2: not a record"),
        (
            [HEADER, {"kind": "dance"}, STEPPED],
            "line 2: this build knows no record of kind 'dance'",
        ),
        ([HEADER, {"kind": ["x"]}], "knows no record of kind ['x']"),
        ([HEADER, STEPPED, {"kind": "plan", "step": 1}], "line 3: the 'plan' record has no proper"),
        ([HEADER, {"kind": "abort", "requests": "x"}], "has no proper 'requests'"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, lines: list[Any], message: str) -> None:
    assert message in refused(write(tmp_path / "file", *lines))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "none")
    assert "Is a directory" in refused(tmp_path)
    (tmp_path / "empty").touch()
    assert "holds no recording" in refused(tmp_path / "empty")
    headers = write(tmp_path / "cut", json.dumps(HEADER, separators=(",", ":"))[:40], end="")
    assert "the header is cut off" in refused(headers)


@pytest.mark.parametrize("damage", [lambda raw: b"\0" * len(raw), lambda raw: b"\xff" + raw])
def test_bytes_that_are_no_text(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = write(tmp_path / "file", HEADER, STEPPED, STEPPED)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], damage(lines[1]), lines[2]]))
    assert "line 2: not a record" in refused(path)
