"""The files that say which labs there are, and whose."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from sparsewire.tools.lab import LabError, records
from sparsewire.tools.lab.plan import Plan
from sparsewire.tools.lab.records import Record

PLAN = Plan("c0ffee00", (10**6, None), 10**6, 1.5)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for records that only this test has."""
    monkeypatch.setattr(records, "_HOME", tmp_path / "run")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "run"


def test_a_record_is_read_as_it_was_written(home: Path) -> None:
    mine = Record.of_mine(PLAN)
    mine.write()
    assert records.read_all() == [mine]
    assert mine.owned
    assert (home / "lab-c0ffee00.json").stat().st_mode & 0o777 == 0o600
    mine.delete()
    assert records.read_all() == []


def test_a_recycled_process_number_is_no_owner() -> None:
    started = Record.of_mine(PLAN).started
    assert started is not None
    assert not Record(PLAN, os.getpid(), started - 1).owned
    assert not Record(PLAN, os.getpid(), None).owned
    assert not Record(PLAN, 2**30, started).owned


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"pid": 1, "started": 1, "plan": {}}'])
def test_damaged_records_say_nothing(home: Path, damage: str) -> None:
    Record.of_mine(PLAN).write()
    (home / "lab-c0ffee00.json").write_text(damage)
    assert records.read_all() == []


def test_a_record_speaks_for_the_lab_in_its_name_only(home: Path) -> None:
    Record.of_mine(PLAN).write()
    content = json.loads((home / "lab-c0ffee00.json").read_text())
    for other in ("deadbeef", "../x", "host"):
        content["plan"]["id"] = other
        (home / "lab-c0ffee00.json").write_text(json.dumps(content))
        assert records.read_all() == []


def test_records_go_elsewhere_if_they_must(home: Path, tmp_path: Path) -> None:
    home.write_text("not a folder")
    Record.of_mine(PLAN).write()
    assert (tmp_path / f"sparsewire-{os.geteuid()}" / "lab-c0ffee00.json").exists()
    assert len(records.read_all()) == 1


def test_folders_that_others_can_write_to_are_not_trusted(home: Path, tmp_path: Path) -> None:
    for folder in (home, tmp_path / f"sparsewire-{os.geteuid()}"):
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(LabError, match="no record of the lab can be kept"):
        Record.of_mine(PLAN).write()
    assert records.read_all() == []
