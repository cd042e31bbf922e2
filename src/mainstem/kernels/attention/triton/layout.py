"""Fields of a plan (`attention/layout.py`) as constants, the only globals that kernels may read.

Values are copied from `attention/layout.py` by name. They are part of the key of Triton's compile
cache.
"""

import triton.language as tl

from mainstem.kernels.attention import layout

HEADER_SMALL_PIECES = tl.constexpr(layout.HEADER_SMALL_PIECES)
HEADER_LARGE_PIECES = tl.constexpr(layout.HEADER_LARGE_PIECES)
HEADER_ENTRIES = tl.constexpr(layout.HEADER_ENTRIES)
HEADER_NUM_ENTRIES = tl.constexpr(layout.HEADER_NUM_ENTRIES)
HEADER_PAGE_IDS = tl.constexpr(layout.HEADER_PAGE_IDS)
HEADER_MERGES = tl.constexpr(layout.HEADER_MERGES)
HEADER_NUM_MERGES = tl.constexpr(layout.HEADER_NUM_MERGES)
HEADER_MOST_PARTIALS = tl.constexpr(layout.HEADER_MOST_PARTIALS)
HEADER_LARGE_ORDER = tl.constexpr(layout.HEADER_LARGE_ORDER)
HEADER_SMALL_ORDER = tl.constexpr(layout.HEADER_SMALL_ORDER)
HEADER_QUEUE = tl.constexpr(layout.HEADER_QUEUE)
HEADER_NUM_QUEUED = tl.constexpr(layout.HEADER_NUM_QUEUED)
HEADER_INTS = tl.constexpr(layout.HEADER_INTS)
SHARE_LARGE_BEGIN = tl.constexpr(layout.SHARE_LARGE_BEGIN)
SHARE_LARGE_END = tl.constexpr(layout.SHARE_LARGE_END)
SHARE_SMALL_BEGIN = tl.constexpr(layout.SHARE_SMALL_BEGIN)
SHARE_SMALL_END = tl.constexpr(layout.SHARE_SMALL_END)
SHARE_SECOND_SMALL = tl.constexpr(layout.SHARE_SECOND_SMALL)
SHARE_FIRST_LARGE = tl.constexpr(layout.SHARE_FIRST_LARGE)
SHARE_FIRST_SMALL = tl.constexpr(layout.SHARE_FIRST_SMALL)
SHARE_INTS = tl.constexpr(layout.SHARE_INTS)
PIECE_ENTRY = tl.constexpr(layout.PIECE_ENTRY)
PIECE_ROW_BEGIN = tl.constexpr(layout.PIECE_ROW_BEGIN)
PIECE_ROW_END = tl.constexpr(layout.PIECE_ROW_END)
PIECE_PAGES_AT = tl.constexpr(layout.PIECE_PAGES_AT)
PIECE_KEY_BEGIN = tl.constexpr(layout.PIECE_KEY_BEGIN)
PIECE_KEY_END = tl.constexpr(layout.PIECE_KEY_END)
PIECE_FIRST_LIMIT = tl.constexpr(layout.PIECE_FIRST_LIMIT)
PIECE_STRETCH = tl.constexpr(layout.PIECE_STRETCH)
PIECE_FIRST_TOKEN = tl.constexpr(layout.PIECE_FIRST_TOKEN)
PIECE_FIRST_PAGE = tl.constexpr(layout.PIECE_FIRST_PAGE)
PIECE_KV_HEAD = tl.constexpr(layout.PIECE_KV_HEAD)
PIECE_INTS = tl.constexpr(layout.PIECE_INTS)
ENTRY_SLOT = tl.constexpr(layout.ENTRY_SLOT)
ENTRY_FIRST_KEY = tl.constexpr(layout.ENTRY_FIRST_KEY)
MERGE_SLOT = tl.constexpr(layout.MERGE_SLOT)
MERGE_PARTIALS = tl.constexpr(layout.MERGE_PARTIALS)
NOTE_HAS_UNIT = tl.constexpr(layout.NOTE_HAS_UNIT)
NOTE_INTS = tl.constexpr(layout.NOTE_INTS)
