"""Tiny corpora made up for tests: numbers in words, and the same in a language of our own."""

from __future__ import annotations

import gzip
from pathlib import Path

from papers.tasks.translation import Corpus

WORDS = ["one", "two", "three", "four", "five", "six", "seven"]
FOREIGN = ["uno", "dos", "tres", "vier", "fünf", "șase", "șapte"]


def sentences(count: int, first: int = 0) -> tuple[list[str], list[str]]:
    """Pairs that differ, of three to five words; the foreign ones have their words backwards."""
    pairs = []
    for number in range(first, first + count):
        digits = [(number // 7**place + place) % 7 for place in range(3 + number % 3)]
        source = " ".join(WORDS[digit] for digit in digits)
        pairs.append((source, " ".join(FOREIGN[digit] for digit in reversed(digits))))
    return [source for source, _ in pairs], [target for _, target in pairs]


def write(folder: Path, corpus: Corpus, train: int = 200, test: int = 20) -> Path:
    """The six files of `corpus`, half of them gzipped."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"train": (train, 0), "val": (test, 1000), corpus.test: (test, 2000)}
    for split, (count, first) in parts.items():
        source, target = sentences(count, first)
        (folder / f"{split}.{corpus.source}").write_text("\n".join(source) + "\n", "utf-8")
        content = gzip.compress(("\n".join(target) + "\n").encode())
        (folder / f"{split}.{corpus.target}.gz").write_bytes(content)
    return folder
