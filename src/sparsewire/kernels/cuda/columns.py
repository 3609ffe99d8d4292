"""Names of the columns of the tables in `plan.Plan`. Row r, column C is at r * …_COLUMNS + C."""
# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl

TILE_COLUMNS = tl.constexpr(4)
TILE_START = tl.constexpr(0)
TILE_STOP = tl.constexpr(1)
TILE_SEGMENT = tl.constexpr(2)  # -1 if it is sent densely
TILE_PLACE = tl.constexpr(3)  # position of a dense tile among the dense values

GROUP_COLUMNS = tl.constexpr(4)
GROUP_TILE = tl.constexpr(0)  # the group's first tile
GROUP_TILES = tl.constexpr(1)
GROUP_SEGMENT = tl.constexpr(2)
GROUP_FIRST = tl.constexpr(3)  # the first group of its segment

SEGMENT_COLUMNS = tl.constexpr(8)
SEGMENT_START = tl.constexpr(0)
SEGMENT_LENGTH = tl.constexpr(1)
SEGMENT_COUNT = tl.constexpr(2)
SEGMENT_CAPACITY = tl.constexpr(3)
SEGMENT_SLOT = tl.constexpr(4)  # the number of entries in earlier segments
SEGMENT_GROUPS = tl.constexpr(5)
SEGMENT_KEY = tl.constexpr(6)
SEGMENT_WANTED = tl.constexpr(7)  # coordinates to draw: chosen or unchosen, whichever are fewer

PART_COLUMNS = tl.constexpr(2)  # the part of the list that belongs to each tile
PART_FIRST = tl.constexpr(0)
PART_LENGTH = tl.constexpr(1)

COUNT_COLUMNS = tl.constexpr(2)  # of each tile's counts
COUNT_OVER = tl.constexpr(0)  # magnitudes over the cut
COUNT_TIES = tl.constexpr(1)  # magnitudes equal to the cut

DRAW_COLUMNS = tl.constexpr(2)
DRAW_SEGMENT = tl.constexpr(0)
DRAW_FIRST = tl.constexpr(1)

SAMPLE_COLUMNS = tl.constexpr(4)
SAMPLE_STRIDE = tl.constexpr(0)
SAMPLE_KEEP = tl.constexpr(1)  # of the shorter sample; the next column: of the longer one
SAMPLE_LONGER = tl.constexpr(3)  # length of the longer sample

BLOCK_COLUMNS = tl.constexpr(3)  # blocks of samples that are too long for one program
BLOCK_SEGMENT = tl.constexpr(0)
BLOCK_FIRST = tl.constexpr(1)
BLOCK_COUNT = tl.constexpr(2)

# columns of the state, one row per segment
FLOOR = tl.constexpr(0)  # magnitudes that reach it are listed
LISTED_COUNT = tl.constexpr(1)  # the number of listed entries
SPILLED = tl.constexpr(2)  # 1 if the list overflowed
PATH = tl.constexpr(3)  # how the rank is found; see rank.py
PREFIX = tl.constexpr(4)  # the digits found so far
LEFT = tl.constexpr(5)  # the rank among magnitudes with this prefix
ABOVE = tl.constexpr(6)  # the number of magnitudes too far above the floor
TICKET = tl.constexpr(7)  # the number of programs that have finished this round
LOWEST = tl.constexpr(8)  # the threshold: smaller magnitudes are not extracted
CUT = tl.constexpr(9)  # the smallest magnitude extracted
QUOTA = tl.constexpr(10)  # the number of magnitudes equal to the cut to extract
OVER = tl.constexpr(11)  # the number of magnitudes over the cut
TIES = tl.constexpr(12)  # the number of magnitudes equal to the cut
LAST = tl.constexpr(13)  # the cut of the last step
MARGIN = tl.constexpr(14)  # next floor / expected cut, times 4096
MISSES = tl.constexpr(15)
STEPS = tl.constexpr(16)
