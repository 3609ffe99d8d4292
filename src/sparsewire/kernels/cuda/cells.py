"""A tile of sums in shared memory, written by inline PTX because Triton cannot scatter into it.

Without PTX (in the interpreter and on AMD), the sums are made in the output itself. Inline PTX runs
once for every thread that holds an element, so no tensor here may have fewer elements than a
program has threads.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .device import NATIVE


@triton.jit
def open_cells(out):
    """Return the cells for the sums of the tile at `out`, at most 4096."""
    if NATIVE:
        cells = tl.inline_asm_elementwise(
            "{ .shared .align 16 .b8 cells[16384]; mov.u32 $0, cells; }",
            "=r,r",
            [tl.program_id(0)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        cells = out
    return cells


@triton.jit
def clear_cells(cells, low, high, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """Zero the cells from `low` to `high`, and maybe others."""
    for chunk in range(0, TILE, CHUNK):
        if NATIVE:
            tl.inline_asm_elementwise(
                "{ .reg .f32 x; mov.f32 x, 0f00000000; st.shared.v4.f32 [$1], {x, x, x, x};"
                " mov.b32 $0, 0; }",
                "=r,r",
                [cells + chunk * 4 + tl.arange(0, CHUNK // 4) * 16],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            at = chunk + tl.arange(0, CHUNK)
            nothing = tl.zeros([CHUNK], tl.float32)
            tl.store(cells + at, nothing, mask=(at >= low) & (at < high))


@triton.jit
def add_to_cells(cells, at, values, goes):
    """Add values to different cells, in any order."""
    if NATIVE:
        tl.inline_asm_elementwise(
            """{
            .reg .pred goes;
            .reg .f32 sum;
            setp.ne.b32 goes, $3, 0;
            @goes ld.shared.f32 sum, [$1];
            @goes add.rn.f32 sum, sum, $2;
            @goes st.shared.f32 [$1], sum;
            mov.b32 $0, 0;
            }""",
            "=r,r,r,r",
            [cells + at * 4, values, goes.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(cells + at, tl.load(cells + at, mask=goes, other=0) + values, mask=goes)


@triton.jit
def write_cells(cells, out, low, high, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """Write the cells from `low` to `high` to the output."""
    if NATIVE:
        is_simple = (high - low == TILE) & (out.to(tl.int64) % 16 == 0)
        for chunk in range(0, TILE, CHUNK):
            if is_simple:
                four = chunk + tl.arange(0, CHUNK // 4) * 4
                tl.inline_asm_elementwise(
                    """{
                    .reg .f32 x<4>;
                    ld.shared.v4.f32 {x0, x1, x2, x3}, [$1];
                    st.global.v4.f32 [$2], {x0, x1, x2, x3};
                    mov.b32 $0, 0;
                    }""",
                    "=r,r,l",
                    [cells + four * 4, (out + four).to(tl.int64)],
                    dtype=tl.int32,
                    is_pure=False,
                    pack=1,
                )
            else:
                at = chunk + tl.arange(0, CHUNK)
                sums = tl.inline_asm_elementwise(
                    "ld.shared.f32 $0, [$1];",
                    "=r,r",
                    [cells + at * 4],
                    dtype=tl.float32,
                    is_pure=False,
                    pack=1,
                )
                tl.store(out + at, sums, mask=(at >= low) & (at < high))
