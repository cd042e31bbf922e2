"""Names of pages: a hash chained over everything that decides a page's contents.

root  = H(format, model identity, page size, salt)
key_0 = H(root,  tokens of page 0)
key_1 = H(key_0, tokens of page 1)      so equal keys mean equal whole prefixes

A chain may branch: a mark is mixed into the keys from some page on. Pages that a truncation moved
hold other values than their tokens and positions would give, so they get other names.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import NamedTuple, cast

from mainstem.core.ids import PageKey
from mainstem.core.step import Int32s

FORMAT = b"mainstem page 1"
BRANCH = b"mainstem branch 1"


def root_key(identity: bytes, page_size: int, salt: bytes) -> PageKey:
    """The key before the first page. `identity` covers weights, dtype, rope and page layout."""
    digest = sha256(FORMAT)
    for part in (identity, page_size.to_bytes(4, "little"), salt):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return PageKey(digest.digest())


class PageName(NamedTuple):
    """A page's key and its place in a chain."""

    key: PageKey
    parent: PageKey  # the key was made from this and the page's tokens
    previous: PageKey | None  # the page before it; None: it is the first
    depth: int


@dataclass(frozen=True, slots=True)
class PageChain:
    """Tokens and the keys of their full pages, in order."""

    root: PageKey
    page_size: int
    token_ids: Int32s
    keys: tuple[PageKey, ...]
    branches: tuple[tuple[int, PageKey], ...] = ()  # (first page of a branch, key before it)
    public_tokens: int = 0  # leading tokens that requests with any salt find; may end inside a page

    @classmethod
    def of(
        cls,
        root: PageKey,
        page_size: int,
        token_ids: Int32s,
        neighbour: "PageChain | None" = None,
    ) -> "PageChain":
        """The chain of `token_ids`; leading pages that `neighbour` shares are not hashed again."""
        known = () if neighbour is None else neighbour._keys_of(root, token_ids)
        rest = token_ids[len(known) * page_size :]
        more = page_keys(known[-1] if known else root, rest, page_size)
        return cls(root, page_size, token_ids, (*known, *more))

    def _keys_of(self, root: PageKey, token_ids: Int32s) -> tuple[PageKey, ...]:
        """Return the keys of the leading pages that hold the same tokens in both chains."""
        if root != self.root or self.branches:
            return ()
        length = min(len(self.token_ids), len(token_ids))
        differs = self.token_ids[:length] != token_ids[:length]
        num_equal = int(differs.argmax()) if differs.any() else length
        return self.keys[: num_equal // self.page_size]

    def num_common(self, other: "PageChain") -> int:
        """How many leading tokens have the same names in both chains."""
        num_keys = min(len(self.keys), len(other.keys))
        # equal keys mean equal prefixes, so the first different page is found by bisection
        depth = bisect_left(range(num_keys), True, key=lambda i: self.keys[i] != other.keys[i])
        if self.parent(depth) != other.parent(depth):
            return depth * self.page_size
        ours, theirs = self.page_tokens(depth), other.page_tokens(depth)
        length = min(len(ours), len(theirs))
        differs = ours[:length] != theirs[:length]
        num_more = int(differs.argmax()) if differs.any() else length
        return depth * self.page_size + num_more

    def extended(self, token_ids: Int32s) -> "PageChain":
        """The chain of `token_ids`, which begin with the tokens of this chain."""
        rest = token_ids[len(self.keys) * self.page_size :]
        more = page_keys(self.parent(len(self.keys)), rest, self.page_size)
        return replace(self, token_ids=token_ids, keys=(*self.keys, *more))

    def first(self, num_tokens: int) -> "PageChain":
        """The chain of the first `num_tokens` tokens."""
        keys = self.keys[: num_tokens // self.page_size]
        return replace(self, token_ids=self.token_ids[:num_tokens], keys=keys)

    def branched(self, num_pages: int, mark: bytes) -> "PageChain":
        """The first `num_pages` pages; pages added later get names that depend on `mark`."""
        depth = min(num_pages, len(self.keys))
        key = PageKey(sha256(BRANCH + self.parent(depth) + mark).digest())
        kept = tuple(branch for branch in self.branches if branch[0] < depth)
        return PageChain(
            self.root,
            self.page_size,
            self.token_ids[: depth * self.page_size],
            self.keys[:depth],
            (*kept, (depth, key)),
        )

    def parent(self, depth: int) -> PageKey:
        """The key before page number `depth`."""
        for number, key in self.branches:
            if number == depth:
                return key
        return self.parent_unbranched(depth)

    def parent_unbranched(self, depth: int) -> PageKey:
        """The key before page number `depth` of a chain that does not branch there."""
        return self.keys[depth - 1] if depth else self.root

    def parent_of_rest(self, num_tokens: int) -> PageKey:
        """The key before those of the first `num_tokens` tokens that fill no page. If there are
        none, no branch is mixed into it: a branch begins after these tokens."""
        depth, num_more = divmod(num_tokens, self.page_size)
        return self.parent(depth) if num_more else self.parent_unbranched(depth)

    def names(self) -> list[PageName]:
        """The names of all full pages."""
        return [self._name(depth) for depth in range(len(self.keys))]

    def last_name(self) -> PageName:
        """The name of the last full page."""
        return self._name(len(self.keys) - 1)

    def _name(self, depth: int) -> PageName:
        previous = self.keys[depth - 1] if depth else None
        return PageName(self.keys[depth], self.parent(depth), previous, depth)

    def next_names(self, last: PageName | None, token_ids: Int32s) -> list[PageName]:
        """The names of pages that hold `token_ids` and follow `last`; None: they follow the chain's
        full pages."""
        depth = len(self.keys) if last is None else last.depth + 1
        if last is None:
            parent, previous = self.parent(depth), self.keys[-1] if self.keys else None
        else:
            parent, previous = last.key, last.key
        names: list[PageName] = []
        for key in page_keys(parent, token_ids, self.page_size):
            names.append(PageName(key, parent, previous, depth))
            parent = previous = key
            depth += 1
        return names

    def tail_key(self) -> PageKey | None:
        """The name of the tokens after the last full page; None: there are none."""
        depth = len(self.keys)
        tail = self.page_tokens(depth)
        return PageKey(sha256(self.parent(depth) + tail.tobytes()).digest()) if len(tail) else None

    def page_tokens(self, depth: int) -> Int32s:
        """The tokens of page number `depth`; the last page may have fewer than a page holds."""
        return self.token_ids[depth * self.page_size : (depth + 1) * self.page_size]


class Naming:
    """Names the pages of prompts for one version of the weights."""

    def __init__(self, identity: bytes, page_size: int) -> None:
        self._identity, self._page_size = identity, page_size
        self._last: PageChain | None = None  # reused: similar prompts arrive together

    def chain(self, token_ids: Int32s, salt: bytes, public_tokens: int) -> PageChain:
        """The names of the pages of `token_ids`.

        Full pages of the first `public_tokens` are named without the salt, so requests with any
        salt find them. The salt is mixed in after them.
        """
        num_public = public_tokens // self._page_size
        if not salt or not num_public:
            root = root_key(self._identity, self._page_size, salt)
            self._last = PageChain.of(root, self._page_size, token_ids, self._last)
            return self._last
        root = root_key(self._identity, self._page_size, b"")
        public = PageChain.of(root, self._page_size, token_ids[: num_public * self._page_size])
        chain = public.branched(num_public, salt).extended(token_ids)
        return replace(chain, public_tokens=public_tokens)


def page_keys(previous: PageKey, token_ids: Int32s, page_size: int) -> list[PageKey]:
    """Keys of the full pages of `token_ids`, continuing the chain from `previous`."""
    raw = token_ids.tobytes()
    width = page_size * token_ids.itemsize
    key: bytes = previous
    keys: list[bytes] = []
    for start in range(0, len(raw) - width + 1, width):
        key = sha256(key + raw[start : start + width]).digest()
        keys.append(key)
    return cast("list[PageKey]", keys)
