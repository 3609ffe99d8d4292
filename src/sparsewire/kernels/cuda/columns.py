"""Columns of the tables in `plan.Plan`, by name: row r, column C is at r * …_COLUMNS + C."""
# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl

TILE_COLUMNS = tl.constexpr(4)
TILE_START = tl.constexpr(0)
TILE_STOP = tl.constexpr(1)
TILE_SEGMENT = tl.constexpr(2)  # -1: is sent densely
TILE_PLACE = tl.constexpr(3)  # of a dense tile among the dense values

GROUP_COLUMNS = tl.constexpr(4)
GROUP_TILE = tl.constexpr(0)  # its first one
GROUP_TILES = tl.constexpr(1)
GROUP_SEGMENT = tl.constexpr(2)
GROUP_FIRST = tl.constexpr(3)  # the first group of its segment

SEGMENT_COLUMNS = tl.constexpr(8)
SEGMENT_START = tl.constexpr(0)
SEGMENT_LENGTH = tl.constexpr(1)
SEGMENT_COUNT = tl.constexpr(2)
SEGMENT_CAPACITY = tl.constexpr(3)
SEGMENT_SLOT = tl.constexpr(4)  # entries before it
SEGMENT_GROUPS = tl.constexpr(5)
SEGMENT_KEY = tl.constexpr(6)
SEGMENT_WANTED = tl.constexpr(7)  # coordinates to draw: those chosen, or those left out

PART_COLUMNS = tl.constexpr(2)  # of the list, a part for every tile
PART_FIRST = tl.constexpr(0)
PART_LENGTH = tl.constexpr(1)

COUNT_COLUMNS = tl.constexpr(2)  # of every tile
COUNT_OVER = tl.constexpr(0)  # the cut
COUNT_TIES = tl.constexpr(1)

DRAW_COLUMNS = tl.constexpr(2)
DRAW_SEGMENT = tl.constexpr(0)
DRAW_FIRST = tl.constexpr(1)

SAMPLE_COLUMNS = tl.constexpr(4)
SAMPLE_STRIDE = tl.constexpr(0)
SAMPLE_KEEP = tl.constexpr(1)  # of the shorter sample; behind it, of the longer
SAMPLE_LONGER = tl.constexpr(3)  # how long the longer one is

BLOCK_COLUMNS = tl.constexpr(3)  # of samples that are too long for one program
BLOCK_SEGMENT = tl.constexpr(0)
BLOCK_FIRST = tl.constexpr(1)
BLOCK_COUNT = tl.constexpr(2)

# columns of the state, one row for every segment
FLOOR = tl.constexpr(0)  # what reaches it is listed
LISTED_COUNT = tl.constexpr(1)  # how many that are
SPILLED = tl.constexpr(2)  # whether there was no room for them
PATH = tl.constexpr(3)  # how the rank is found; see rank.py
PREFIX = tl.constexpr(4)  # the digits found
LEFT = tl.constexpr(5)  # the rank among those that share the prefix
ABOVE = tl.constexpr(6)  # magnitudes too far above the floor
TICKET = tl.constexpr(7)  # programs that are done with this round
LOWEST = tl.constexpr(8)  # the threshold: what is below is not withdrawn
CUT = tl.constexpr(9)  # the smallest magnitude withdrawn
QUOTA = tl.constexpr(10)  # how many of those equal to the cut are withdrawn
OVER = tl.constexpr(11)  # how many are over the cut
TIES = tl.constexpr(12)  # and equal to it
LAST = tl.constexpr(13)  # the cut of the step before
MARGIN = tl.constexpr(14)  # the next floor's share of the cut expected, times 4096
MISSES = tl.constexpr(15)
STEPS = tl.constexpr(16)
