"""All studies by name."""

from __future__ import annotations

from . import aji2017, eghlidi2020
from .recipe import Study

STUDIES: dict[str, Study] = {study.name: study for study in (aji2017.MNIST, *eghlidi2020.ALL)}
