"""Builds the compact tree of the prefixes that prompts share.

All work on tokens is vectorised. As in quicksort, each round divides classes of prompts that agree
in their first d tokens:

    one leader per class, drawn at random         leader   a b c d e f g
    every other member is compared with it,       member   a b c x ...     agrees in 3 tokens
    from token d on, in wide vector strips        member   a b c x ...     agrees in 3 tokens
                                                  member   a b c d e q     agrees in 5 tokens

The leader's path has a node wherever members leave it (here at 3 and 5). Members that leave it at
the same place with the same token form a class of the next round. All rounds together
compare each token of a prompt once, and a random leader makes the number of rounds logarithmic, so
the work is linear in the tokens.

Sorting members by (where they left the leader, the token there) puts them in lexicographic order: a
member that leaves with a smaller token comes before the leader, and the earlier it leaves, the
further before. So the result does not depend on which leaders were drawn.
"""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from mainstem.core.plan import Int32s, Int64s, Prompts

FIRST_STRIP_TOKENS = 16  # most pairs of unrelated prompts differ within this many tokens
STRIP_GROWTH = 16  # the next strip is wider: prompts that agree in one usually agree for long
WIDEST_STRIP_TOKENS = 1024
TILE_TOKENS = 1 << 17  # tokens of one comparison, so that its operands stay in the cache
NO_TOKEN = -(1 << 40)  # what follows the last token; sorts before every int32


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """Prompts in lexicographic order and the nodes that two or more of them pass through.

    Node v stands for the first `node_tokens[v]` tokens of the prompts `order[begins[v]:ends[v]]`.
    Nodes are in preorder; node 0 is the root: no tokens, all prompts, its own parent. Equal prompts
    keep their input order and share a node of their full length.
    """

    order: Int64s  # [prompts] prompt indices
    prompt_tokens: Int64s  # [prompts] lengths, in this order
    prompt_nodes: Int64s  # [prompts] the deepest node of each prompt, in this order
    node_parents: Int64s
    node_tokens: Int64s
    node_begins: Int64s
    node_ends: Int64s

    @property
    def node_runs(self) -> Int64s:
        """[nodes] the tokens a node adds to its parent."""
        return self.node_tokens - self.node_tokens[self.node_parents]

    @property
    def own_tokens(self) -> Int64s:
        """[prompts] the tokens below each prompt's deepest node, in sorted order."""
        return self.prompt_tokens - self.node_tokens[self.prompt_nodes]

    @property
    def subtree_ends(self) -> Int64s:
        """[nodes] one past the last node of the subtree. The subtree of v is
        `v:subtree_ends[v]`."""
        ends = np.searchsorted(self.node_begins, self.node_ends, side="left")
        # if there are no prompts, the root's range is empty
        return np.maximum(ends, np.arange(1, len(ends) + 1))

    @property
    def node_levels(self) -> Int64s:
        """[nodes] the number of nodes above: 0 for the root."""
        count = len(self.node_tokens)
        closed = np.cumsum(np.bincount(self.subtree_ends, minlength=count + 1)[:count])
        return np.arange(count) - closed

    @property
    def subtree_tokens(self) -> Int64s:
        """[nodes] the different tokens in a node's subtree, its own run included."""
        runs = np.concatenate([[0], np.cumsum(self.node_runs)])
        own = np.concatenate([[0], np.cumsum(self.own_tokens)])
        first = np.arange(len(self.node_tokens))
        shared = runs[self.subtree_ends] - runs[first]
        return np.asarray(shared + own[self.node_ends] - own[self.node_begins], dtype=np.int64)


@dataclass(slots=True)
class _Classes:
    """Ranges of `order` whose prompts agree in their first `tokens` tokens, below `parents`.

    A batch of nodes has the same fields.
    """

    begins: Int64s
    ends: Int64s
    tokens: Int64s
    parents: Int64s


@dataclass(slots=True)
class _Rows:
    """The members of all open classes, class by class, sorted within each class."""

    positions: Int64s  # places in `order`
    class_of: Int64s
    is_leader: np.ndarray[tuple[int], np.dtype[np.bool_]]
    matched: Int64s  # tokens in common with the leader
    next_tokens: Int64s  # the token after these, or NO_TOKEN
    # class_of * stride + place; members before the leader have places below `top`, others above
    slots: Int64s
    top: int
    stride: int


def build_tree(prompts: Prompts) -> PrefixTree:
    """The compact prefix tree of all prompts."""
    count = len(prompts)
    order = np.arange(count, dtype=np.int64)
    prompt_nodes = np.zeros(count, dtype=np.int64)
    root = np.zeros(1, dtype=np.int64)
    found = [_Classes(root, root + count, root, root)]  # the nodes, a batch per round
    num_nodes = 1
    rng = np.random.default_rng(0)
    open_classes = _Classes(root, root + count, root, root)
    if count < 2:
        open_classes = _Classes(root[:0], root[:0], root[:0], root[:0])
    while len(open_classes.begins):
        rows = _sort_by_leader(prompts, order, open_classes, rng)
        nodes, row_nodes = _nodes_on_leader_paths(open_classes, rows, num_nodes)
        prompt_nodes[rows.positions] = row_nodes
        found.append(nodes)
        num_nodes += len(nodes.begins)
        open_classes = _next_classes(rows, row_nodes)
    return _in_preorder(prompts, order, prompt_nodes, found)


def _sort_by_leader(
    prompts: Prompts, order: Int64s, classes: _Classes, rng: np.random.Generator
) -> _Rows:
    """Draw a leader per class, sort each class around it; `order` is updated in place."""
    sizes = classes.ends - classes.begins
    class_of = np.repeat(np.arange(len(sizes)), sizes)
    firsts = np.cumsum(sizes) - sizes
    positions = np.arange(len(class_of)) + np.repeat(classes.begins - firsts, sizes)
    who = order[positions]
    drawn = (rng.random(len(sizes)) * sizes).astype(np.int64)
    leaders = order[classes.begins + drawn][class_of]

    token_ids, starts = prompts.token_ids, prompts.starts
    begins, leader_begins = starts[who], starts[leaders]
    lengths, leader_lengths = starts[who + 1] - begins, starts[leaders + 1] - leader_begins
    matched = np.where(who == leaders, lengths, classes.tokens[class_of])
    limits = np.minimum(lengths, leader_lengths)
    _extend_matches(token_ids, begins, leader_begins, matched, limits)
    tokens = _tokens_at(token_ids, begins + matched, matched < lengths)
    leader_tokens = _tokens_at(token_ids, leader_begins + matched, matched < leader_lengths)

    top = int(matched.max()) + 1
    stride = 2 * top + 1
    place = np.where(tokens < leader_tokens, matched, 2 * top - matched)
    place[tokens == leader_tokens] = top
    slots = class_of * stride + place
    sorting = np.lexsort((tokens, slots))
    order[positions] = who[sorting]
    return _Rows(
        positions=positions,
        class_of=class_of,
        is_leader=(who == leaders)[sorting],
        matched=matched[sorting],
        next_tokens=tokens[sorting],
        slots=slots[sorting],
        top=top,
        stride=stride,
    )


def _extend_matches(
    token_ids: Int32s, begins: Int64s, others: Int64s, matched: Int64s, limits: Int64s
) -> None:
    """Raise `matched` in place to the common length of each pair of runs, at most `limits`.

    A strip may read past the end of a run, into its neighbour in `token_ids`; the limit removes
    matches found there.
    """
    rows = np.flatnonzero(matched < limits)
    width = min(FIRST_STRIP_TOKENS, len(token_ids))
    while len(rows):
        still: list[Int64s] = []
        windows = sliding_window_view(token_ids, width)
        height = max(1, TILE_TOKENS // width)
        for first in range(0, len(rows), height):
            part = rows[first : first + height]
            done = matched[part]
            ours = _strips(token_ids, windows, begins[part] + done)
            differs = ours != _strips(token_ids, windows, others[part] + done)
            where = differs.argmax(axis=1)
            is_apart = differs[np.arange(len(part)), where]
            done = np.minimum(done + np.where(is_apart, where, width), limits[part])
            matched[part] = done
            still.append(part[~is_apart & (done < limits[part])])
        rows = np.concatenate(still)
        if len(rows):
            longest = int((limits[rows] - matched[rows]).max())
            width = min(STRIP_GROWTH * width, longest, WIDEST_STRIP_TOKENS)


def _strips(token_ids: Int32s, windows: Int32s, begins: Int64s) -> Int32s:
    """Return [begins, width] the tokens from each begin on. After the last token of all, this token
    is repeated. `windows[i]` is the strip that begins at token i. Copying whole strips makes this
    fast.
    """
    last = len(windows) - 1
    strips = windows[np.minimum(begins, last)]
    over = np.flatnonzero(begins > last)
    if len(over):
        reach = begins[over, None] + np.arange(windows.shape[1])
        strips[over] = token_ids[np.minimum(reach, len(token_ids) - 1)]
    return strips


def _tokens_at(
    token_ids: Int32s, places: Int64s, exists: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> Int64s:
    tokens = np.full(len(places), NO_TOKEN, dtype=np.int64)
    tokens[exists] = token_ids[places[exists]]
    return tokens


def _nodes_on_leader_paths(
    classes: _Classes, rows: _Rows, num_nodes: int
) -> tuple[_Classes, Int64s]:
    """Return the nodes where members leave their leaders, and the deepest node of every row.

    During the lookup a node's key is class * stride + tokens. New nodes get numbers from
    `num_nodes` on; only the root, which exists already, is found again as node 0.
    """
    stride = rows.stride
    names = rows.class_of * stride + rows.matched
    keys = np.unique(names[~rows.is_leader])
    key_class, key_tokens = np.divmod(keys, stride)
    numbers = num_nodes + np.arange(len(keys))
    is_root = key_tokens == 0  # only the class of the first round can divide at token 0
    numbers = np.where(is_root, 0, numbers - int(is_root.sum()))

    # before the leader, each row leaves it later than the row above; after it, earlier
    before = rows.slots[rows.slots % stride < rows.top]
    after = rows.slots[rows.slots % stride > rows.top]
    class_slots = key_class * stride
    left = np.searchsorted(before, keys) - np.searchsorted(before, class_slots)
    right = np.searchsorted(after, class_slots + stride) - np.searchsorted(
        after, class_slots + 2 * rows.top - key_tokens, side="right"
    )
    is_first = np.diff(key_class, prepend=-1) > 0
    above = np.concatenate([[0], numbers[:-1]])
    nodes = _Classes(
        begins=(classes.begins[key_class] + left)[~is_root],
        ends=(classes.ends[key_class] - right)[~is_root],
        tokens=key_tokens[~is_root],
        parents=np.where(is_first, classes.parents[key_class], above)[~is_root],
    )
    deepest = np.searchsorted(keys, (rows.class_of + 1) * stride) - 1
    row_keys = np.where(rows.is_leader, deepest, np.searchsorted(keys, names))
    return nodes, numbers[row_keys]


def _next_classes(rows: _Rows, row_nodes: Int64s) -> _Classes:
    """Return the next classes: two or more rows that left their leader at the same place with the
    same token."""
    is_new = np.ones(len(rows.slots), dtype=np.bool_)
    is_new[1:] = (np.diff(rows.slots) != 0) | (np.diff(rows.next_tokens) != 0)
    firsts = np.flatnonzero(is_new)
    sizes = np.diff(firsts, append=len(is_new))
    keep = (sizes > 1) & (rows.next_tokens[firsts] != NO_TOKEN)
    firsts, sizes = firsts[keep], sizes[keep]
    begins = rows.positions[firsts]
    return _Classes(begins, begins + sizes, rows.matched[firsts] + 1, row_nodes[firsts])


def _in_preorder(
    prompts: Prompts, order: Int64s, prompt_nodes: Int64s, found: list[_Classes]
) -> PrefixTree:
    begins = np.concatenate([nodes.begins for nodes in found])
    tokens = np.concatenate([nodes.tokens for nodes in found])
    sorting = np.lexsort((tokens, begins))
    rank = np.empty(len(sorting), dtype=np.int64)
    rank[sorting] = np.arange(len(sorting))
    parents = np.concatenate([nodes.parents for nodes in found])
    ends = np.concatenate([nodes.ends for nodes in found])
    return PrefixTree(
        order=order,
        prompt_tokens=prompts.num_tokens[order],
        prompt_nodes=rank[prompt_nodes],
        node_parents=rank[parents[sorting]],
        node_tokens=tokens[sorting],
        node_begins=begins[sorting],
        node_ends=ends[sorting],
    )
