"""docs/wire.md and the code say the same bytes."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.adapters.audit import Audit
from sparsewire.codecs import IndexCodec
from sparsewire.collectives import Transfer, sharded
from sparsewire.counters import Counters
from sparsewire.exchange import Call, Exchange
from sparsewire.groups import SimulatedGroup
from sparsewire.kernels import bits
from sparsewire.message import (
    CHECKSUM,
    FINE,
    HEADER_BYTES,
    MAGIC,
    REASONS,
    STATUS_BYTES,
    VALUES,
    VERSION,
    Header,
    check_statuses,
    corruption_code,
    fingerprint,
    pack_status,
)
from sparsewire.randomness import fold
from sparsewire.requests import Request, Routine, Step
from sparsewire.segments import Segments
from sparsewire.session import Session, Topology
from sparsewire.state import RESIDUAL, StepState
from sparsewire.sums import CHUNK
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


SCHEME = sw.Scheme(sw.TopK(count=2), values=sw.TwoBit(), dense_below=0, dense_1d=False)
EXCHANGE = Exchange(SCHEME, SCHEME.partition({"w": (4, 5)}), 2)
CALL = Call(7, 1, bucket=3)
CONTEXT = EXCHANGE.context(CALL)


def payload(step: Step) -> Tensor:
    assert isinstance(step, Request)
    assert step.op == "all_gather"
    return step.payload


def sent() -> tuple[Tensor, Tensor]:
    """The header and the message of rank 1, with 1.0 at index 3 and −3.0 at index 17."""
    gradient = torch.zeros(20)
    gradient[3], gradient[17] = 1.0, -3.0
    state = StepState({}, {RESIDUAL: torch.zeros(21)})
    run = EXCHANGE.run(gradient, state, CALL, Counters(), Workspace())
    header = payload(next(run))
    other = replace(Header.unpack(header, 1), rank=0)
    return header, payload(run.send([other.pack(), header]))


def test_every_example_is_looked_at() -> None:
    names = {"header", "message", "packed", "eliasfano", "bitmap", "int32", "status", "corruption"}
    assert set(EXAMPLES) == names
    assert PAGE.count("```text\n") == len(names)


def test_header() -> None:
    header, message = sent()
    assert written(header) == bytes_of("header")
    assert Header.unpack(tensor_of("header"), 1) == Header(
        rank=1,
        step=7,
        bucket=3,
        scheme=fingerprint(SCHEME.identity, ""),
        layout=fingerprint("torch.float32", "w:(4, 5)"),
        length=message.numel(),
    )
    assert repr(SCHEME) in PAGE
    assert f"`{SCHEME.identity}`" in PAGE


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
    assert values.pop("checksum") == plain_digest(bytes_of("header")[:-8], 0)
    assert values == {name: getattr(header, name) for name in values}
    at = 0
    for (offset, _, _), line in zip(rows, EXAMPLES["header"], strict=True):
        assert int(offset) == at
        at += len(line)


def test_message() -> None:
    _, message = sent()
    assert written(message) == bytes_of("message")
    layout = EXCHANGE.layout
    message = tensor_of("message")
    entries = layout.decode(message, pytest.fail, 0, torch.float32, Workspace())
    assert layout.inspect([message], [entries], CONTEXT.common, 1).all()
    indices, values = entries
    assert indices.tolist() == [3, 17]
    assert values.tolist() == [1.0, -3.0]
    low, flags, step, codes, padding, _ = EXAMPLES["message"]
    assert len(low + flags) == layout.index_bytes
    assert len(step + codes) == layout.value_bytes
    assert padding == bytes(layout.padding_bytes)


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


def plain_key(*chunk_and_rank: int, layout: int | None = None) -> int:
    header = Header.unpack(tensor_of("header"), 1)
    key, layout = 0, header.layout if layout is None else layout
    for number in (CALL.step, CALL.bucket, header.scheme, layout, *chunk_and_rank):
        key = plain_mix(key ^ number)
    return key


@pytest.mark.parametrize("name", ["message", "status", "corruption"])
def test_digests_without_the_library(name: str) -> None:
    data, layout = bytes_of(name), None if name == "message" else 0
    key = plain_key(CALL.rank, layout=layout)
    assert data[-8:] == struct.pack("<Q", plain_digest(data[:-8], key))


def test_chunks_of_a_sum() -> None:
    assert replace(CONTEXT, chunk=0).key(1) == plain_key(1)
    assert replace(CONTEXT, chunk=3).key(1) == plain_key(3, 1)
    assert f"chunks of {CHUNK:,} values" in PAGE


class Tap(SimulatedGroup):
    """Keeps what rank 1 of a machine of two ranks gets from its leader."""

    def __init__(self, **groups: Sequence[Sequence[int]]) -> None:
        super().__init__(2, **groups)
        self.heard: list[bytes] = []

    def carry(self, ranks: Sequence[int], requests: Sequence[Request]) -> list[Any]:
        answers = super().carry(ranks, requests)
        if len(ranks) == 2:
            to_rank_1 = answers[1] if requests[0].op == "broadcast" else answers[1][0]
            self.heard.append(written(to_rank_1.view(torch.uint8)))
        return answers


def _fold(*words: int) -> int:
    key = 0
    for word in words:
        key = plain_mix(key ^ word)
    return key


def _is_sealed(data: bytes, key: int) -> bool:
    return data[-8:] == struct.pack("<Q", plain_digest(data[:-8], key))


def _step(session: Session, *shared: Tensor) -> Routine[None]:
    """The step of the page's examples on one rank: its gradient is its local rank everywhere."""
    transaction = session.begin()
    unit = transaction.unit(0, {"w": (4, 5)}, torch.float32, torch.device("cpu"))
    unit.flat.fill_(session.topology.local_rank)
    yield from transaction.exchange(unit, CALL.bucket)
    for payload in shared:
        yield from transaction.share(payload)
    yield from transaction.agree()


def test_inside_a_machine() -> None:
    """What the page says about `intra_node=`, in plain Python; one machine is enough."""
    tap = Tap(exchange=[[0], [1]], status=[[0], [1]])
    sessions = [
        Session(sw.parse("Dense()"), {"w": (4, 5)}, Topology(0, 1, local, 2), step=CALL.step)
        for local in range(2)
    ]
    buffer = torch.arange(3, dtype=torch.uint8)
    tap.drive([_step(each, buffer) for each in sessions], [each.counters for each in sessions])
    header, shares, sums, mean, buffers, found, statuses = tap.heard
    say = Header.unpack(torch.frombuffer(bytearray(header), dtype=torch.uint8), 0)
    common = _fold(CALL.step, CALL.bucket, say.scheme, say.layout)
    of_step = _fold(CALL.step, CALL.bucket, say.scheme, 0)
    assert shares == struct.pack("<10f", *[0] * 10) + shares[-8:]
    assert sums == struct.pack("<10f", *[0.5] * 10) + sums[-8:]
    for share in (shares, sums):
        assert _is_sealed(share, _fold(common, 5, 0, 0))
    for message, key, held in (
        (mean, _fold(common, 5, 0), struct.pack("<20f", *[0.5] * 20)),
        (buffers, _fold(_fold(common, 6), 5, 0), bytes([0, 1, 2, 0, 0, 0, 0, 0])),
        (statuses, _fold(of_step, 5, 0), statuses[2048:-8]),
    ):
        note, rest = message[:2048], message[2048:]
        assert note[:2040] == bytes(2040)
        assert _is_sealed(note, _fold(5, 0))
        assert rest[:-8] == held
        assert _is_sealed(rest, key)
    assert found == struct.pack("<q", -1) + found[-8:]
    assert _is_sealed(found, _fold(of_step, 5, 0, 0))
    assert statuses[2048:2064] == struct.pack("<qq", -1, -1)


def test_the_note_of_an_error() -> None:
    tap = Tap(exchange=[[0], [1]], status=[[0], [1]])
    sessions = [
        Session(sw.parse("Dense()"), {"w": (4, 5)}, Topology(0, 1, local, 2), step=7 + local)
        for local in range(2)
    ]
    runs = [_step(session) for session in sessions]
    error, _ = tap.outcomes(runs, [session.counters for session in sessions])
    assert isinstance(error, sw.errors.DisagreementError)
    note = tap.heard[-1][:2048]
    assert note[:2040] == f"DisagreementError\n{error}".encode().ljust(2040, b"\0")
    assert _is_sealed(note, _fold(5, 0))


def test_the_audit() -> None:
    tap = Tap()
    weights = {"w": torch.arange(19.0), "b": torch.ones(3, dtype=torch.bfloat16)}
    audits = [Audit(10), Audit(10)]
    for audit in audits:
        audit.optimizer_steps = 13
    tap.drive(
        [audit.compare(weights, 20, rank) for rank, audit in enumerate(audits)],
        [Counters(), Counters()],
    )
    (message,) = tap.heard
    wide, narrow = plain_digest(struct.pack("<18f", *range(18)), 19), b"\x80\x3f" * 3 + bytes(2)
    wide ^= struct.unpack("<Q", struct.pack("<ff", 18.0, 0.0))[0]
    assert message[:-8] == struct.pack("<qQ", 13, wide) + narrow
    assert _is_sealed(message, _fold(20, 0, fingerprint("audit"), 0, 0))


def test_packed_integers() -> None:
    numbers = torch.tensor([1, 2, 3, 1023])
    assert written(bits.pack(numbers, 10)) == bytes_of("packed")
    assert torch.equal(bits.unpack(tensor_of("packed"), 4, 10), numbers)


def segments(shape: tuple[int, int]) -> Segments:
    return Segments.partition({"w": shape}, sw.TopK(count=5), dense_below=0, dense_1d=False)


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


def status_of(corruption: int) -> Tensor:
    return pack_status(torch.tensor(corruption), torch.tensor(FINE), CONTEXT.status.key(CALL.rank))


def test_statuses() -> None:
    assert written(status_of(FINE)) == bytes_of("status")
    assert written(status_of(corruption_code(0, VALUES))) == bytes_of("corruption")
    assert len(bytes_of("status")) == STATUS_BYTES
    assert f"{len(REASONS)} · sender + reason" in PAGE
    fine = torch.tensor(FINE)
    first = pack_status(fine, fine, CONTEXT.status.key(0))
    assert check_statuses(torch.stack([first, tensor_of("status")]), CONTEXT) == {}
    with pytest.raises(
        sw.errors.CorruptMessageError, match=f"rank 0 that rank 1 received at.*{REASONS[VALUES]}"
    ):
        check_statuses(torch.stack([first, tensor_of("corruption")]), CONTEXT)
    overflow = pack_status(torch.tensor(corruption_code(0, VALUES)), fine, CONTEXT.status.key(0))
    share = pack_status(torch.tensor(corruption_code(3, CHECKSUM)), fine, CONTEXT.status.key(1))
    with pytest.raises(sw.errors.CorruptMessageError, match=r"rank 3 that rank 1 received at"):
        check_statuses(torch.stack([overflow, share]), CONTEXT)
    non_finite = pack_status(fine, torch.tensor(5), CONTEXT.status.key(0))
    assert check_statuses(torch.stack([non_finite, tensor_of("status")]), CONTEXT) == {0: 5}


def test_keys_of_messages_to_and_from_owners() -> None:
    transfer = cast(Transfer, SimpleNamespace(context=CONTEXT))
    assert "fold(common, 1, owner, rank)" in " ".join(PAGE.split())
    assert sharded._message_key(transfer, 1, 2, 3) == fold(CONTEXT.common, 1, 2, 3)
    assert "fold(common, 2, 0, rank)" in " ".join(PAGE.split())
    assert sharded._message_key(transfer, 2, sender=3) == fold(CONTEXT.common, 2, 0, 3)


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
    assert len(texts) == 8
    for text in texts:
        for segment in re.split(r"…|disagrees|at step …, bucket …|at step|: its checksum.*", text):
            assert segment.strip(" :,") in whole, f"no error says {segment!r}"
