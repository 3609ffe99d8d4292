"""Sentence pairs are found, read, cut into subwords and judged; what is wrong with them is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from papers.tasks import translation
from papers.tasks.translation import (
    BEGIN,
    END,
    NO_LABEL,
    PAD,
    UNKNOWN,
    Examples,
    Judge,
    LibraryError,
    Pairs,
    Subwords,
)
from sparsewire.tools.tasks.idx import DataError

from . import textpairs

CORPUS = translation.CORPORA["multi30k"]


@pytest.mark.parametrize("inside", ["", "raw", "multi30k", "multi30k/raw"])
def test_found_where_data_points(tmp_path: Path, inside: str) -> None:
    folder = textpairs.write(tmp_path / inside, CORPUS)
    assert translation.find(CORPUS, tmp_path) == folder


def test_found_where_the_variable_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = textpairs.write(tmp_path / "tatoeba-en-ro", translation.CORPORA["tatoeba-en-ro"])
    monkeypatch.setenv("SPARSEWIRE_DATA", str(tmp_path))
    assert translation.find(translation.CORPORA["tatoeba-en-ro"]) == folder


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    textpairs.write(tmp_path, CORPUS)
    (tmp_path / "val.de.gz").unlink()
    with pytest.raises(DataError, match=r"train\.en, val\.en, test_2016_flickr\.en and the same"):
        translation.find(CORPUS, tmp_path)


def test_read(tmp_path: Path) -> None:
    text = translation.read(CORPUS, textpairs.write(tmp_path, CORPUS, train=30, test=4))
    assert [len(part) for part in (text.train, text.val, text.test)] == [30, 4, 4]
    assert (text.train.source, text.train.target) == textpairs.sentences(30)
    assert text.test.source == textpairs.sentences(4, 2000)[0]
    assert len(text.train.first(7)) == 7


def test_sides_of_different_length_are_refused(tmp_path: Path) -> None:
    textpairs.write(tmp_path, CORPUS)
    (tmp_path / "val.en").write_text("one\ntwo\n")
    with pytest.raises(DataError, match=r"val in .* has 2 lines in en and 20 in de"):
        translation.read(CORPUS, tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [("train.de.gz", b"no gzip"), ("train.de.gz", b"\x1f\x8b"), ("train.en", b"\xff")],
)
def test_damage_is_told(tmp_path: Path, name: str, content: bytes) -> None:
    (textpairs.write(tmp_path, CORPUS) / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} is damaged"):
        translation.read(CORPUS, tmp_path)


@pytest.fixture(scope="module")
def subwords() -> Subwords:
    source, target = textpairs.sentences(100)
    return Subwords([*source, *target], 60)


def test_subwords_there_and_back(subwords: Subwords) -> None:
    source, target = textpairs.sentences(10)
    again = Subwords([*textpairs.sentences(100)[0], *textpairs.sentences(100)[1]], 60)
    assert len(subwords) == 60
    for sentences in (source, target):
        rows = subwords.write(sentences)
        assert rows == again.write(sentences)
        assert min(min(row) for row in rows) > END
        assert subwords.read([[*row, END, PAD, 7] for row in rows]) == sentences
        assert subwords.read(rows) == sentences


def test_few_sentences_have_few_subwords() -> None:
    assert 8 <= len(Subwords(["a b c", "c b a"] * 3, 500)) < 50
    with pytest.raises(DataError, match="5 subwords cannot be learnt"):
        Subwords(["a b c"], 5)


def test_pairs_that_are_too_long_are_left_out(subwords: Subwords) -> None:
    pairs = Pairs(["one", "one " * 9, "two"], ["uno", "uno", "dos " * 9])
    examples, left_out = translation.fit(pairs, subwords, 8)
    assert (len(examples), left_out) == (1, 2)
    (word,) = subwords.write(["uno"])
    assert examples.targets.tolist() == [[BEGIN, *word, END, *[PAD] * (7 - len(word))]]
    cut = translation.cut(pairs.source, subwords, 8)
    assert cut.shape == (3, 8)
    assert cut[1, -1] == END


EXAMPLES = Examples(
    torch.tensor([[5, 6, 7, END], [8, END, PAD, PAD]]),
    torch.tensor([[BEGIN, 9, 8, 7, END], [BEGIN, 9, END, PAD, PAD]]),
)


def test_a_batch_predicts_the_next_word() -> None:
    pairs, labels = EXAMPLES.whole(torch.tensor([1, 0]))
    assert pairs.tolist() == [
        [[8, END, PAD, PAD], [BEGIN, 9, END, PAD]],
        [[5, 6, 7, END], [BEGIN, 9, 8, 7]],
    ]
    assert labels.tolist() == [[9, END, NO_LABEL, NO_LABEL], [9, 8, 7, END]]


def test_words_are_left_out_and_marks_are_not() -> None:
    pairs, labels = EXAMPLES.batch(torch.tensor([[0, 0b1010, 0b0011], [1, 0b1111, 0b1111]]))
    assert pairs.tolist() == [
        [[5, UNKNOWN, 7, END], [BEGIN, UNKNOWN, 8, 7]],
        [[UNKNOWN, END, PAD, PAD], [BEGIN, UNKNOWN, END, PAD]],
    ]
    assert torch.equal(labels, EXAMPLES.whole(torch.tensor([0, 1]))[1])


def test_an_epoch_follows_from_seed_and_number() -> None:
    rows = translation.visit(3, 1, 400, 62)
    assert torch.equal(rows, translation.visit(3, 1, 400, 62))
    assert not torch.equal(rows[:, 1:], translation.visit(3, 2, 400, 62)[:, 1:])
    assert rows[:, 0].sort().values.tolist() == list(range(400))
    bits = (rows[:, 1:, None] >> torch.arange(62)) & 1
    assert float(bits.double().mean()) == pytest.approx(translation.LEFT_OUT, abs=0.01)
    assert bool((rows[:, 1:] >> 62 == 0).all())
    with pytest.raises(ValueError, match="at most 62"):
        translation.visit(0, 0, 10, 63)


def test_bleu() -> None:
    judge = Judge(["a small house stands on the hill", "she reads a long book"])
    assert judge.score(["a small house stands on the hill", "she reads a long book"]) == (
        pytest.approx(100)
    )
    assert 0 < judge.score(["a small house stands on a tree", "he reads a long book"]) < 90
    assert "version:" in judge.signature
    assert "tok:13a" in judge.signature


@pytest.mark.parametrize("library", ["sentencepiece", "sacrebleu"])
def test_a_missing_library_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        LibraryError, match=rf"needs {library}.*pip install sentencepiece sacrebleu"
    ):
        translation.check_libraries()
