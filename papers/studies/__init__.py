"""All studies by name."""

from __future__ import annotations

from ..recipe import Study
from . import accuracy, aji2017, aji2017_translation, beyond, eghlidi2020

_ALL = (
    aji2017.MNIST,
    aji2017_translation.TRANSLATION,
    aji2017_translation.RATES_OF_TRANSLATION,
    *eghlidi2020.ALL,
    beyond.BEYOND,
    accuracy.CIFAR10,
    accuracy.GPT,
)
STUDIES: dict[str, Study] = {study.name: study for study in _ALL}
