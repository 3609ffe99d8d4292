"""A checkpoint is whole or does not count, and is never loaded for a run it does not fit."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from sparsewire.tools.cli import checkpoint
from sparsewire.tools.cli.errors import CommandError
from sparsewire.tools.cli.plan import Plan


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(
        scheme="Scheme(TopK(0.01))",
        epochs=2,
        batch_size=32,
        lr=0.1,
        momentum=0.0,
        optimizer="sgd",
        hidden=(8, 4),
        seed=0,
        limit=None,
        data="/data",
        timeout=60.0,
        checkpoint=str(tmp_path),
        resume=True,
    )


def save(plan: Plan, step: int, workers: int = 2) -> Path:
    assert plan.checkpoint is not None
    directory = Path(plan.checkpoint)
    states = {checkpoint.wire_file(rank): {"memory": torch.ones(3)} for rank in range(workers)}
    states[checkpoint.MODEL] = {"step": torch.tensor(step)}
    files = {
        name: checkpoint.write_file(directory, step, name, state) for name, state in states.items()
    }
    checkpoint.complete(directory, step, files, plan, workers)
    return directory / f"step-{step:08d}"


def test_round_trip_keeps_the_newest_two(plan: Plan, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(plan, step)
    assert {folder.name for folder in tmp_path.iterdir()} == {"step-00000020", "step-00000030"}
    found = checkpoint.to_resume(plan, 2)
    assert found.step == 30
    found.verify()
    assert int(found.load(checkpoint.MODEL)["step"]) == 30
    assert torch.equal(found.load(checkpoint.wire_file(1))["memory"], torch.ones(3))


def test_files_are_private_and_nothing_else_is_left(plan: Plan) -> None:
    folder = save(plan, 10)
    names = {file.name for file in folder.iterdir()}
    assert names == {"model.pt", "wire-0.pt", "wire-1.pt", "manifest.json"}
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}


def test_what_a_killed_run_left_is_removed_at_the_next_save(plan: Plan, tmp_path: Path) -> None:
    save(plan, 10)
    (save(plan, 20) / "manifest.json").unlink()  # killed while it wrote
    (tmp_path / "step-00000030").mkdir()
    for name in (".wire-0.pt.123", "wire-7.pt"):
        (tmp_path / "step-00000030" / name).write_bytes(b"half")
    (save(plan, 40) / "manifest.json").unlink()  # another rank may be at it already
    kept = {"model.pt", "wire-0.pt", "wire-1.pt", "manifest.json"}
    assert {file.name for file in save(plan, 30).iterdir()} == kept
    names = {folder.name for folder in tmp_path.iterdir()}
    assert names == {"step-00000010", "step-00000030", "step-00000040"}
    assert checkpoint.to_resume(plan, 2).step == 30


def test_folders_are_on_disk_before_the_checkpoint_counts(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = [], os.fsync

    def note(descriptor: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((place, (tmp_path / "step-00000010" / "manifest.json").exists()))
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", note)
    folder = save(plan, 10)
    assert (tmp_path, False) in synced
    assert synced[-1] == (folder, True)


@pytest.mark.parametrize("name", ["step-00000010", "step-00000010/model.pt"])
def test_symbolic_links_are_refused(plan: Plan, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path.with_name(f"{tmp_path.name}-elsewhere")
    path = save(plan, 10).parent / name
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(CommandError, match=f"{path} is a symbolic link, which"):
        checkpoint.to_resume(plan, 2).verify()


def test_no_file_is_written_through_a_link(plan: Plan, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "step-00000010"
    folder.mkdir()
    (folder / "model.pt").symlink_to(victim)
    (folder / f".model.pt.{os.getpid()}").symlink_to(victim)
    assert {file.is_symlink() for file in save(plan, 10).iterdir()} == {False}
    assert victim.read_text() == "mine"
    (tmp_path / "step-00000020").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(CommandError, match="step-00000020 is a symbolic link"):
        checkpoint.write_file(tmp_path, 20, "model.pt", {})


def test_without_manifest_it_does_not_count(plan: Plan) -> None:
    save(plan, 10)
    (save(plan, 20) / "manifest.json").unlink()
    assert checkpoint.to_resume(plan, 2).step == 10


@pytest.mark.parametrize("name", ["model.pt", "wire-1.pt"])
def test_a_flipped_bit_is_found(plan: Plan, name: str) -> None:
    folder = save(plan, 10)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    found = checkpoint.to_resume(plan, 2)
    with pytest.raises(CommandError, match=f"{name} is damaged"):
        found.verify()
    with pytest.raises(CommandError, match=f"remove {folder}"):
        found.load(name)


def test_a_missing_file_is_named(plan: Plan) -> None:
    folder = save(plan, 10)
    (folder / "wire-0.pt").unlink()
    with pytest.raises(CommandError, match=r"wire-0\.pt"):
        checkpoint.to_resume(plan, 2).verify()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"schema": 1}', '{"schema": 2}'])
def test_a_damaged_manifest(plan: Plan, content: str) -> None:
    folder = save(plan, 10)
    (folder / "manifest.json").write_text(content)
    with pytest.raises(CommandError, match=r"manifest\.json is"):
        checkpoint.to_resume(plan, 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scheme": "Scheme(Dense())"}, r"with scheme Scheme\(TopK\(0.01\)\), not Scheme\(Dense"),
        ({"seed": 1}, "with seed 0, not 1"),
        ({"hidden": (8,)}, r"with hidden \[8, 4\], not \[8\]"),
        ({"batch_size": 64}, "with batch-size 32, not 64"),
        ({"limit": 5}, "with limit None, not 5"),
    ],
)
def test_another_run(plan: Plan, change: dict[str, object], reason: str) -> None:
    save(plan, 10)
    with pytest.raises(CommandError, match=reason):
        checkpoint.to_resume(dataclasses.replace(plan, **change), 2)  # type: ignore[arg-type]


def test_a_longer_run_may_go_on(plan: Plan) -> None:
    save(plan, 10)
    longer = dataclasses.replace(plan, epochs=9, data="/elsewhere", timeout=5.0)
    assert checkpoint.to_resume(longer, 2).step == 10


def test_other_number_of_workers(plan: Plan) -> None:
    save(plan, 10)
    with pytest.raises(CommandError, match="written by 2 workers and cannot be resumed by 3"):
        checkpoint.to_resume(plan, 3)


def test_a_new_run_does_not_begin_on_top_of_an_old_one(plan: Plan, tmp_path: Path) -> None:
    checkpoint.refuse_to_overwrite(tmp_path)
    save(plan, 10)
    with pytest.raises(CommandError, match="already holds a checkpoint of step 10"):
        checkpoint.refuse_to_overwrite(tmp_path)


def test_a_failed_write_leaves_the_old_file(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(plan, 10)
    before = (folder / "model.pt").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write_file(tmp_path, 10, "model.pt", {"step": torch.tensor(11)})
    assert (folder / "model.pt").read_bytes() == before
    assert json.loads((folder / "manifest.json").read_text())["step"] == 10
