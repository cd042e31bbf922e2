"""What lies where in a plan: fields that the planner writes and kernels read, by the same names.

A plan is one int32 array, so that it travels in one copy:

    header  | HEADER_INTS ints, the HEADER_ fields
    shares  | [programs, SHARE_INTS]: a program's part of the orders, and a copy of its first units,
            | which saves a chain of look-ups
    queue   | [units, PIECE_INTS]: small units that programs claim when they are free
    orders  | [large units], [small units]: piece * (units of a piece) + (place in the piece)
    large   | [pieces, PIECE_INTS]; a piece is a unit of every KV head
    small   | [pieces, PIECE_INTS]
    entries | [ENTRY_ROWS, entries]: a query token in a span; PLAIN_ENTRY_ROWS if no windows
    merges  | [MERGE_ROWS, merges]: a token that leaves Partials
    pages   | page ids of all spans

Kernels take the fields from `triton/layout.py`. Nothing here needs Triton.
"""

# Header. Offsets are in ints from the start of the plan.
HEADER_SMALL_PIECES = 0
HEADER_LARGE_PIECES = 1
HEADER_ENTRIES = 2
HEADER_NUM_ENTRIES = 3
HEADER_PAGE_IDS = 4
HEADER_MERGES = 5
HEADER_NUM_MERGES = 6
HEADER_MOST_PARTIALS = 7  # of a token
HEADER_LARGE_ORDER = 8
HEADER_SMALL_ORDER = 9
HEADER_QUEUE = 10
HEADER_NUM_QUEUED = 11
HEADER_INTS = 32

# A program's share. It fills one line of the card's cache.
SHARE_LARGE_BEGIN = 0  # places in the order of large units, [begin, end)
SHARE_LARGE_END = 1
SHARE_SMALL_BEGIN = 2  # the same for small units
SHARE_SMALL_END = 3
SHARE_SECOND_SMALL = 5  # its second small unit: a number as in the order
SHARE_FIRST_LARGE = 8  # where the PIECE_ fields of its first large unit begin
SHARE_FIRST_SMALL = 20  # the same for its first small unit
SHARE_INTS = 32

# A piece, or a single unit that is stored in full.
PIECE_ENTRY = 0  # first entry of the span
PIECE_ROW_BEGIN = 1  # packed rows of the span, [begin, end)
PIECE_ROW_END = 2
PIECE_PAGES_AT = 3  # where the span's page ids begin
PIECE_KEY_BEGIN = 4  # keys of the span, [begin, end)
PIECE_KEY_END = 5
PIECE_FIRST_LIMIT = 6  # query j sees keys up to and including this field + j
PIECE_STRETCH = 7  # which stretch of the span this is
PIECE_FIRST_TOKEN = 8  # of the span; -1: its tokens are not neighbours in the step
PIECE_FIRST_PAGE = 9  # page id of its first key
PIECE_KV_HEAD = 10  # of a single unit: its first KV head
PIECE_INTS = 12

# Rows of the tables of tokens.
ENTRY_TOKEN = 0
ENTRY_SLOT = 1  # of the token's first Partial in this span; -1: the output is written at once
ENTRY_FIRST_KEY = 2  # first key of the span that the token sees; only with windows
ENTRY_ROWS = 3
PLAIN_ENTRY_ROWS = 2
MERGE_TOKEN = 0
MERGE_SLOT = 1  # of its first Partial
MERGE_PARTIALS = 2  # how many
MERGE_ROWS = 3

# A note in shared memory, from one warp of Hopper's small kernel to the others. It has the PIECE_
# fields of a unit, and whether there is one.
NOTE_HAS_UNIT = 11
NOTE_INTS = 16
