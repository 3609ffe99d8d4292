"""Sentence pairs: finding and reading them, their subwords, and BLEU.

A corpus is plain text with one sentence per line. Both languages share one vocabulary, which is
learned from the training text alone. All sentences are padded to the same length, so that every
step has the same shapes. All random choices of an epoch (order, words left out) are a table that
follows from (seed, epoch) alone.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsewire.errors import SparsewireError
from sparsewire.tools.tasks.idx import DataError

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU

PAD, UNKNOWN, BEGIN, END = range(4)
NO_LABEL = -100  # the label that torch's cross entropy ignores
LONGEST = 62  # subwords that one integer has bits for
LEFT_OUT = 0.1  # the share of words that are left out in training
_SPLITS = {"train": ("train",), "val": ("val", "valid", "dev"), "test": ("test",)}


class LibraryError(SparsewireError):
    """A library that only this task needs is not installed."""


@dataclass(frozen=True)
class Corpus:
    """A published set of sentence pairs, and the direction of translation.

    `test` is the name of its test set if there are several.
    """

    name: str
    title: str
    source: str
    target: str
    test: str = "test"


CORPORA = {
    corpus.name: corpus
    for corpus in (
        Corpus("multi30k", "Multi30k", "en", "de", "test_2016_flickr"),
        Corpus("tatoeba-en-ro", "Tatoeba English–Romanian", "ro", "en"),
    )
}


@dataclass(frozen=True)
class Pairs:
    """Sentences in two languages, line by line."""

    source: list[str]
    target: list[str]

    def __len__(self) -> int:
        return len(self.source)

    def first(self, count: int | None) -> Pairs:
        """Return the first `count` pairs; all if it is None."""
        return Pairs(self.source[:count], self.target[:count])


@dataclass(frozen=True)
class Text:
    """The three parts of a corpus: training, validation, test."""

    train: Pairs
    val: Pairs
    test: Pairs


def find(corpus: Corpus, given: Path | None = None) -> Path:
    """Return the folder with the six files of `corpus`.

    Searches `given` if there is one, or else ``$SPARSEWIRE_DATA`` and ``./data``; in each of these
    the folder of the corpus's name, and ``raw`` inside it.

    Raises:
        DataError: some of the files were not found.
    """
    if given is not None:
        places = [given / corpus.name, given]
    else:
        places = [Path("data") / corpus.name]
        if os.environ.get("SPARSEWIRE_DATA"):
            places.insert(0, Path(os.environ["SPARSEWIRE_DATA"]) / corpus.name)
    for place in places:
        for folder in (place, place / "raw"):
            if all(_file(folder, *part) for part in _parts(corpus)):
                return folder
    split = ", ".join(f"{split}.{corpus.source}" for split in ("train", "val", corpus.test))
    raise DataError(
        f"{corpus.title} is not in {' nor in '.join(str(place) for place in places)}: it is not "
        f"part of sparsewire and cannot be fetched by --download; put {split} and the same in "
        f"{corpus.target}, plain text with one sentence a line, gzipped (.gz) or not, into "
        f"$SPARSEWIRE_DATA/{corpus.name}, or into {corpus.name} in the folder that --data names"
    )


def read(corpus: Corpus, folder: Path) -> Text:
    """Read and check the six files in `folder`.

    Raises:
        DataError: one of them is damaged, or two have different numbers of lines.
    """
    sides = [_lines(path) for part in _parts(corpus) if (path := _file(folder, *part))]
    pairs = []
    for source, target, split in zip(sides[::2], sides[1::2], _SPLITS, strict=True):
        if len(source) != len(target) or not source:
            raise DataError(
                f"{split} in {folder} has {len(source):,} lines in {corpus.source} and "
                f"{len(target):,} in {corpus.target}: line by line they must be translations"
            )
        pairs.append(Pairs(source, target))
    return Text(*pairs)


def _parts(corpus: Corpus) -> Iterator[tuple[tuple[str, ...], str]]:
    """Return possible file names and the language, for both languages of every split."""
    for split, names in _SPLITS.items():
        for language in (corpus.source, corpus.target):
            yield (corpus.test, *names) if split == "test" else names, language


def _file(folder: Path, names: Sequence[str], language: str) -> Path | None:
    paths = [folder / f"{name}.{language}{end}" for name in names for end in ("", ".gz")]
    return next((path for path in paths if path.is_file()), None)


def _lines(path: Path) -> list[str]:
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        return content.decode("utf-8").removesuffix("\n").split("\n")
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        reason = str(error).rstrip(".")
        raise DataError(f"{path} is damaged ({reason}): replace it by a fresh copy") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


class Subwords:
    """A vocabulary of byte pairs that both languages share, learned from `sentences`.

    It is the same for the same sentences. It has fewer than `size` subwords if the sentences have
    no more.
    """

    def __init__(self, sentences: Sequence[str], size: int) -> None:
        library = _sentencepiece()
        model = io.BytesIO()
        try:
            library.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences),
                model_writer=model,
                model_type="bpe",
                vocab_size=size,
                hard_vocab_limit=False,
                character_coverage=1.0,
                pad_id=PAD,
                unk_id=UNKNOWN,
                bos_id=BEGIN,
                eos_id=END,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise DataError(f"{size:,} subwords cannot be learnt: {error}") from error
        self._processor = library.SentencePieceProcessor(model_proto=model.getvalue())

    def __len__(self) -> int:
        return int(self._processor.get_piece_size())

    def write(self, sentences: Sequence[str]) -> list[list[int]]:
        """Return every sentence as the numbers of its subwords."""
        found: list[list[int]] = self._processor.encode(list(sentences))
        return found

    def read(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return sentences from numbers, each up to its end."""
        kept = [row[: row.index(END)] if END in row else row for row in map(list, rows)]
        found: list[str] = self._processor.decode(kept)
        return found


@dataclass(frozen=True)
class Examples:
    """Pairs as numbers: sources end with END, targets begin with BEGIN and end with END."""

    sources: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.sources)

    def to(self, device: torch.device) -> Examples:
        """The same on another device."""
        return Examples(self.sources.to(device), self.targets.to(device))

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return sources and targets side by side with words left out, and the words to predict.

        Args: rows: for every pair its index, and a bit for each word of either language that is
        left out, as from `visit`.
        """
        pairs, labels = self.whole(rows[:, 0])
        places = torch.arange(pairs.shape[2], device=rows.device)
        is_gone = (rows[:, 1:, None] >> places) & 1 == 1
        return pairs.masked_fill(is_gone & (pairs > END), UNKNOWN), labels

    def whole(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The same with all words."""
        targets = self.targets[chosen]
        pairs = torch.stack([self.sources[chosen], targets[:, :-1]], dim=1)
        following = targets[:, 1:]
        return pairs, following.masked_fill(following == PAD, NO_LABEL)


def fit(pairs: Pairs, subwords: Subwords, length: int) -> tuple[Examples, int]:
    """Return the pairs of at most `length` subwords with their ends, and how many were longer."""
    both = zip(subwords.write(pairs.source), subwords.write(pairs.target), strict=True)
    short = [pair for pair in both if max(map(len, pair)) < length]
    sources = _table([[*source, END] for source, _ in short], length)
    targets = _table([[BEGIN, *target, END] for _, target in short], length + 1)
    return Examples(sources, targets), len(pairs) - len(short)


def cut(sentences: Sequence[str], subwords: Subwords, length: int) -> Tensor:
    """Return sentences as numbers; sentences that are too long are cut, without their ends."""
    return _table([[*row[: length - 1], END] for row in subwords.write(sentences)], length)


def _table(rows: Sequence[Sequence[int]], length: int) -> Tensor:
    return torch.tensor(
        [[*row, *[PAD] * (length - len(row))] for row in rows], dtype=torch.int64
    ).view(len(rows), length)


def visit(seed: int, epoch: int, size: int, length: int) -> Tensor:
    """Return how `epoch` visits `size` pairs: index, and the words left out on either side, as
    bits."""
    if length > LONGEST:
        raise ValueError(f"sentences have room for {length} subwords; at most {LONGEST} work")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(size, generator=generator)
    gone = torch.rand(size, 2, length, generator=generator) < LEFT_OUT
    return torch.cat([order[:, None], (gone << torch.arange(length)).sum(dim=2)], dim=1)


class Judge:
    """BLEU against one reference each, by sacrebleu; `signature` describes how it is computed."""

    def __init__(self, references: Sequence[str]) -> None:
        self._metric: BLEU = _bleu()(references=[list(references)])
        self.signature = ""

    def score(self, translations: Sequence[str]) -> float:
        """Return BLEU, from 0 to 100."""
        found = float(self._metric.corpus_score(list(translations), None).score)
        self.signature = str(self._metric.get_signature())
        return found


def check_libraries() -> None:
    """Check, before training, that the libraries are installed.

    Raises:
        LibraryError: one is not.
    """
    _sentencepiece()
    _bleu()


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ModuleNotFoundError as error:
        raise _missing(error, "sentencepiece") from error
    return sentencepiece


def _bleu() -> type[BLEU]:
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ModuleNotFoundError as error:
        raise _missing(error, "sacrebleu") from error
    return BLEU


def _missing(error: ModuleNotFoundError, library: str) -> LibraryError:
    part = "" if error.name == library else f" (its part {error.name})"
    return LibraryError(
        f"translation needs {library}{part}, which is not installed: "
        "pip install sentencepiece sacrebleu"
    )
