"""Which kernels are taken: the fastest at hand, the reference where told, a warning where slow."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from sparsewire import kernels
from sparsewire.kernels import reference

from ..laws.cases import CPU
from ..patience import wait_for


@pytest.fixture
def anew() -> Iterator[None]:
    """Forget what was chosen before, and afterwards."""
    for cached in (kernels._fastest, kernels.prepare):
        cached.cache_clear()
    yield
    for cached in (kernels._fastest, kernels.prepare):
        cached.cache_clear()


def test_the_fast_ones_are_taken_unless_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.SWITCH, raising=False)
    from sparsewire.kernels import cpu

    assert kernels.on(CPU) is cpu  # type: ignore[comparison-overlap]
    monkeypatch.setenv(kernels.SWITCH, "reference")
    assert kernels.on(CPU) is reference  # type: ignore[comparison-overlap]


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(("kind", "package"), [("cpu", "numba"), ("cuda", "triton")])
def test_one_warning_says_what_a_missing_package_costs(
    monkeypatch: pytest.MonkeyPatch, kind: str, package: str
) -> None:
    monkeypatch.delenv(kernels.SWITCH, raising=False)
    real = kernels._module

    def missing(name: str) -> kernels.Kernels:
        if name == "reference":
            return real(name)
        raise ImportError(f"No module named {package!r}")

    monkeypatch.setattr(kernels, "_module", missing)
    words = f"{package} is missing.* times as long; pip install {package}"
    with pytest.warns(RuntimeWarning, match=words):
        assert kernels.on(torch.device(kind)) is reference  # type: ignore[comparison-overlap]
    assert kernels.on(torch.device(kind)) is reference  # type: ignore[comparison-overlap]


@pytest.mark.usefixtures("anew")
def test_other_devices_get_the_reference() -> None:
    assert kernels.on(torch.device("meta")) is reference  # type: ignore[comparison-overlap]


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("name", ["reference", "auto"])
def test_everything_is_tried_ahead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setenv(kernels.SWITCH, name)
    with caplog.at_level(logging.INFO, "sparsewire.kernels"):
        kernels.prepare("cpu")
        kernels.prepare("cpu")
    assert [r.message for r in caplog.records if "ready after" in r.message] != []
    assert len([r for r in caplog.records if "ready after" in r.message]) == 1


@pytest.mark.usefixtures("anew")
def test_a_long_wait_is_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "PATIENCE", 0.05)
    monkeypatch.setattr(
        kernels, "_try_all", lambda *_: wait_for(lambda: "preparing kernels" in caplog.text)
    )
    kernels.prepare("cpu")
