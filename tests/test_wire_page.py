"""docs/wire.md and the code say the same bytes."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.collectives.sums import CHUNK
from sparsewire.desk import Call, Desk
from sparsewire.engine import Exchange
from sparsewire.indices import IndexCodec
from sparsewire.kernels import bits
from sparsewire.message import (
    FINE,
    HEADER_BYTES,
    MAGIC,
    REASONS,
    VALUES,
    VERDICT_BYTES,
    VERSION,
    Header,
    damage_code,
    fingerprint,
    pack_verdict,
    settle,
)
from sparsewire.meter import Meter
from sparsewire.segments import Segments
from sparsewire.workspace import Workspace

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "wire.md").read_text()


def _examples() -> dict[str, list[bytes]]:
    """The hex blocks by name, line by line; two spaces end the bytes of a line."""
    found = {}
    for name, text in re.findall(r"^```text\nexample: (\w+)\n(.*?)^```$", PAGE, re.M | re.S):
        assert name not in found
        found[name] = [bytes.fromhex(line.split("  ")[0]) for line in text.splitlines()]
    return found


EXAMPLES = _examples()


def bytes_of(name: str) -> bytes:
    return b"".join(EXAMPLES[name])


def tensor_of(name: str) -> Tensor:
    return torch.frombuffer(bytearray(bytes_of(name)), dtype=torch.uint8)


def written(data: Tensor) -> bytes:
    return bytes(data.tolist())


SCHEME = sw.Scheme(sw.TopK(count=2), values=sw.TwoBit(), whole=None)
CALL = Call(7, 1, 2, bucket=3)


def exchange() -> Exchange:
    return Exchange(SCHEME, SCHEME.cut({"w": (4, 5)}))


def desk() -> Desk:
    after = {"residual": torch.zeros(21)}
    return exchange().desk(torch.zeros(20), {}, after, CALL, Meter(), Workspace())


def test_every_example_is_looked_at() -> None:
    names = {"header", "message", "packed", "eliasfano", "bitmap", "int32", "verdict", "damage"}
    assert set(EXAMPLES) == names
    assert PAGE.count("```text\n") == len(names)


def test_header() -> None:
    header = exchange()._header(CALL)
    assert written(header.pack()) == bytes_of("header")
    assert Header.unpack(tensor_of("header"), 1) == header
    assert header.scheme == fingerprint(repr(SCHEME), "")
    assert header.layout == fingerprint("torch.float32", "w:(4, 5)")
    assert repr(SCHEME) in PAGE


def test_header_table() -> None:
    """Offsets and types of the page's table, against the bytes of the example."""
    table = PAGE.split("## The header")[1].split("A fingerprint")[0]
    rows = re.findall(r"^\| (\d+) \| ([\w ]+) \| (\w+) \|", table, re.M)
    codes = {"4 bytes": "4s", "uint16": "H", "uint32": "I", "int32": "i", "int64": "q"}
    fields = "".join({**codes, "uint64": "Q"}[kind] for _, kind, _ in rows)
    assert f"`<{fields}`" in PAGE
    assert struct.calcsize("<" + fields) == HEADER_BYTES
    values = dict(
        zip(
            (name for *_, name in rows),
            struct.unpack("<" + fields, bytes_of("header")),
            strict=True,
        )
    )
    header = Header.unpack(tensor_of("header"), 1)
    assert values.pop("magic") == MAGIC
    assert values.pop("reserved") == 0
    assert values.pop("digest") == plain_digest(bytes_of("header")[:-8], 0)
    assert values == {name: getattr(header, name) for name in values}
    at = 0
    for (offset, _, _), line in zip(rows, EXAMPLES["header"], strict=True):
        assert int(offset) == at
        at += len(line)


def test_message() -> None:
    indices, values = torch.tensor([3, 17]), torch.tensor([1.0, -3.0])
    assert written(desk().write(indices, values)) == bytes_of("message")
    read_indices, read_values, findings = desk().open(tensor_of("message"), rank=1)
    assert all(findings)
    assert read_indices.tolist() == [3, 17]
    assert read_values.tolist() == [1.0, -3.0]
    low, flags, step, codes, padding, _ = EXAMPLES["message"]
    sizes = exchange().form
    assert len(low + flags) == sizes.index_bytes
    assert len(step + codes) == sizes.value_bytes
    assert padding == bytes(sizes.padding_bytes)


ALL_BITS, GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15


def plain_mix(word: int) -> int:
    """SplitMix64 as published."""
    word = (word + GOLDEN) & ALL_BITS
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & ALL_BITS
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & ALL_BITS
    return word ^ (word >> 31)


def plain_digest(data: bytes, key: int) -> int:
    """The page's words in plain Python."""
    words = struct.unpack(f"<{len(data) // 8}Q", data)
    total = sum(plain_mix(w ^ (i * GOLDEN & ALL_BITS)) for i, w in enumerate(words, start=1))
    return plain_mix((total & ALL_BITS) ^ plain_mix(key))


def plain_key(*chunk_and_rank: int) -> int:
    header = exchange()._header(CALL)
    key = 0
    for number in (CALL.step, CALL.bucket, header.scheme, header.layout, *chunk_and_rank):
        key = plain_mix(key ^ number)
    return key


@pytest.mark.parametrize("name", ["message", "verdict", "damage"])
def test_digests_without_the_library(name: str) -> None:
    data = bytes_of(name)
    assert data[-8:] == struct.pack("<Q", plain_digest(data[:-8], plain_key(CALL.rank)))


def test_chunks_of_a_sum() -> None:
    context = exchange().context(CALL)
    assert replace(context, chunk=0).key(1) == plain_key(1)
    assert replace(context, chunk=3).key(1) == plain_key(3, 1)
    assert f"chunks of {CHUNK:,} values" in PAGE


def test_packed_integers() -> None:
    numbers = torch.tensor([1, 2, 3, 1023])
    assert written(bits.pack(numbers, 10)) == bytes_of("packed")
    assert torch.equal(bits.unpack(tensor_of("packed"), 4, 10), numbers)


def segments(shape: tuple[int, int]) -> Segments:
    return Segments.cut({"w": shape}, sw.TopK(count=5), whole=None)


@pytest.mark.parametrize(
    ("name", "codec", "shape", "indices"),
    [
        ("eliasfano", sw.EliasFano(), (10, 20), [3, 40, 41, 130, 199]),
        ("bitmap", sw.Bitmap(), (4, 6), [0, 3, 8, 9, 23]),
        ("int32", sw.Int32(), (10, 20), [3, 40, 41, 130, 199]),
    ],
)
def test_indices(name: str, codec: IndexCodec, shape: tuple[int, int], indices: list[int]) -> None:
    cut = segments(shape)
    assert f"n = {cut.size} and the indices {', '.join(map(str, indices))}" in PAGE
    assert written(codec.encode(torch.tensor(indices), cut)) == bytes_of(name)
    assert codec.decode(tensor_of(name), cut).tolist() == indices
    assert codec.nbytes(cut) == len(bytes_of(name))


def test_elias_fano_without_the_library() -> None:
    """The page's words in plain Python."""
    low, flags = (int.from_bytes(line, "little") for line in EXAMPLES["eliasfano"])
    count, size = 5, 200
    width = (size // count).bit_length() - 1
    positions = [at for at in range(16) if flags >> at & 1]
    indices = [
        (position - i) << width | low >> (i * width) & ((1 << width) - 1)
        for i, position in enumerate(positions)
    ]
    assert indices == [3, 40, 41, 130, 199]
    assert len(EXAMPLES["eliasfano"][0]) == -(-count // 8) * width
    assert len(EXAMPLES["eliasfano"][1]) == -(-(count + (size >> width) + 1) // 8)


def verdict_of(damage: int) -> Tensor:
    context = exchange().context(CALL)
    return pack_verdict(torch.tensor(damage), torch.tensor(FINE), context.key(CALL.rank))


def test_verdicts() -> None:
    assert written(verdict_of(FINE)) == bytes_of("verdict")
    assert written(verdict_of(damage_code(0, VALUES))) == bytes_of("damage")
    assert len(bytes_of("verdict")) == VERDICT_BYTES
    assert f"{len(REASONS)} · sender + reason" in PAGE
    context, fine = exchange().context(CALL), torch.tensor(FINE)
    first = pack_verdict(fine, fine, context.key(0))
    assert settle(torch.stack([first, tensor_of("verdict")]), context) == {}
    with pytest.raises(sw.DamageError, match=f"rank 0 that rank 1 received at.*{REASONS[VALUES]}"):
        settle(torch.stack([first, tensor_of("damage")]), context)
    unsound = pack_verdict(fine, torch.tensor(5), context.key(0))
    assert settle(torch.stack([unsound, tensor_of("verdict")]), context) == {0: 5}


def test_reasons_and_version() -> None:
    assert re.findall(r"^\| (\d) \| (it[^|]*) \|$", PAGE, re.M) == [
        (str(number), words) for number, words in enumerate(REASONS)
    ]
    assert f"format version {VERSION}." in PAGE


def test_error_texts_are_those_of_the_library() -> None:
    source = Path(sw.__file__).parent
    whole = "\n".join(path.read_text() for path in source.rglob("*.py"))
    whole = re.sub(r'"\s*\n\s*f?"', "", whole)
    table = PAGE.split("## What is checked")[1].split("\nAll ranks")[0]
    texts = [text for text in re.findall(r"`([^`]+)`", table) if "…" in text]
    assert len(texts) == 5
    for text in texts:
        for piece in re.split(r"…|disagrees|at step …, bucket …|at step|: its checksum.*", text):
            assert piece.strip(" :,") in whole, f"no error says {piece!r}"
