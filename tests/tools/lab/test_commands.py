"""Finding the programs that a lab is made with."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsewire.tools.lab import commands


def test_programs_outside_a_users_path_are_found_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where /usr/sbin, in which tc lies, is in root's PATH alone."""
    tool = tmp_path / "shape-it"
    tool.write_text("#!/bin/sh\necho shaped $1\n")
    tool.chmod(0o755)
    assert commands.find("shape-it") is None
    monkeypatch.setattr(commands, "_ADMINISTRATION", (str(tmp_path),))
    assert commands.find("shape-it") == str(tool)
    assert commands.run(["shape-it", "eth0"]) == "shaped eth0\n"


def test_the_usual_places_of_administrators_are_among_those(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    seen: list[str] = []
    monkeypatch.setattr(commands.shutil, "which", lambda name, path: seen.append(path))
    commands.find("tc")
    assert seen == ["/nowhere:/usr/local/sbin:/usr/sbin:/sbin"]
