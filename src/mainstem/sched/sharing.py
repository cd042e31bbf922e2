"""Which running sequences hold the same pages: a radix tree over their page tables.

    stem 1  pages 0..63    held by a b c d        system prompt
      stem 2  pages 64..127  held by a b            a document
        stem 4  128..130     a                      (one holder: a's own tokens)
        stem 5  128..131     b
      stem 3  pages 64..70   held by c d ...

A stem is a run of pages that exactly the same sequences hold. The tree changes when a sequence
starts or ends, in time proportional to its depth; a step reads it with vector operations.
"""

from dataclasses import dataclass, field

import numpy as np

from mainstem.core.snapshot import StemView
from mainstem.core.step import Float32s, Int32s

ROOT = 0  # no pages, held by all sequences


@dataclass(slots=True)
class _Stem:
    pages: Int32s
    first: int  # page index at which it begins
    parent: int
    children: dict[int, int] = field(default_factory=dict)  # first page -> stem
    num_attached: int = 0  # sequences that end here

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


class SharingTree:
    """Sequences attach with the full pages of their known tokens when they start, and detach when
    they leave."""

    def __init__(self, version: int = 0) -> None:
        self._stems: list[_Stem | None] = [_Stem(np.empty(0, np.int32), 0, ROOT)]
        self._free: list[int] = []
        self._stem_of_slot: Int32s = np.zeros(64, np.int32)
        self.parent: Int32s = np.zeros(64, np.int32)
        self.end: Int32s = np.zeros(64, np.int32)  # page index after the stem
        self._holders: Int32s = np.zeros(64, np.int32)
        self.version = version  # changes with every attach and detach

    def attach(self, slot: int, pages: Int32s) -> None:
        """Record that `slot` holds `pages`, from its first page on. Full pages only: they never
        change again."""
        self.version += 1
        node = ROOT
        done = 0
        while True:
            stem = self._stem(node)
            self._holders[node] += 1
            child = stem.children.get(int(pages[done])) if done < len(pages) else None
            if child is None:
                break
            run = self._stem(child).pages
            length = min(len(run), len(pages) - done)
            same = run[:length] == pages[done : done + length]
            common = length if same.all() else int(same.argmin())
            if common < len(run):
                child = self._split(child, common)
            done += common
            node = child
        if done < len(pages):
            node = self._add(node, pages[done:].copy(), done)
            self._holders[node] = 1
        self._stem(node).num_attached += 1
        if slot >= len(self._stem_of_slot):
            self._stem_of_slot = _grown(self._stem_of_slot, slot)
        self._stem_of_slot[slot] = node

    def detach(self, slot: int) -> None:
        self.version += 1
        node = int(self._stem_of_slot[slot])
        self._stem(node).num_attached -= 1
        while True:
            stem = self._stem(node)
            self._holders[node] -= 1
            parent = stem.parent
            if node == ROOT:
                return
            if self._holders[node] == 0:
                del self._stem(parent).children[int(stem.pages[0])]
                self._drop(node)
            elif len(stem.children) == 1 and stem.num_attached == 0:
                self._join_only_child(node)
            node = parent

    def stems_of(self, slots: Int32s) -> Int32s:
        """The deepest stem of each slot."""
        return self._stem_of_slot.take(slots)

    def shares(self, slots: Int32s) -> tuple[Int32s, Float32s]:
        """Return how many pages each slot has in the tree, and its part of them: a page counts as
        1/holders."""
        stems = self._stem_of_slot.take(slots)
        in_tree = self.end[stems]
        part = np.zeros(len(slots), np.float32)
        while stems.any():
            above = self.parent[stems]
            length = self.end[stems] - self.end[above]
            part += length / np.maximum(self._holders[stems], 1)
            stems = above
        return in_tree, part

    def shared_ends(self, slots: Int32s) -> Int32s:
        """How many first pages of each slot other slots hold, too."""
        stems = self._stem_of_slot.take(slots)
        ends = np.zeros(len(slots), np.int32)
        while stems.any():
            is_shared = self._holders[stems] > 1
            ends = np.maximum(ends, np.where(is_shared, self.end[stems], 0))
            stems = self.parent[stems]
        return ends

    def pages(self, stem: int, first: int) -> Int32s:
        """Pages from index `first` to the end of `stem`, along its ancestors."""
        parts: list[Int32s] = []
        while stem != ROOT:
            node = self._stem(stem)
            if node.end <= first:
                break
            parts.append(node.pages[max(0, first - node.first) :])
            stem = node.parent
        return np.concatenate(parts[::-1]) if len(parts) > 1 else parts[0]

    def view(self, page_size: int) -> tuple[StemView, ...]:
        """The stems that several sequences hold, parents first."""
        found: list[StemView] = []
        roots = self._stem(ROOT).children.values()
        pending: list[tuple[int, int | None]] = [(child, None) for child in roots]
        while pending:
            number, parent = pending.pop()
            holders = int(self._holders[number])
            if holders < 2:
                continue
            stem = self._stem(number)
            found.append(StemView(number, parent, len(stem.pages) * page_size, holders))
            pending += [(child, number) for child in stem.children.values()]
        return tuple(found)

    def check(self) -> None:
        """Raise if counts or links are wrong."""
        for number, stem in enumerate(self._stems):
            if stem is None:
                continue
            below = sum(int(self._holders[child]) for child in stem.children.values())
            assert self._holders[number] == below + stem.num_attached, "holders do not add up"
            for first_page, child in stem.children.items():
                node = self._stem(child)
                assert node.parent == number == self.parent[child], "a child has another parent"
                assert node.first == stem.end, "a child does not follow its parent"
                assert node.end == self.end[child], "an end is out of date"
                assert int(node.pages[0]) == first_page, "a child is filed under another page"
            if number != ROOT:
                assert self._holders[number] > 0, "a stem without holders"
                assert len(stem.pages) > 0, "a stem without pages"

    def _stem(self, number: int) -> _Stem:
        stem = self._stems[number]
        assert stem is not None
        return stem

    def _add(self, parent: int, pages: Int32s, first: int) -> int:
        stem = _Stem(pages, first, parent)
        if self._free:
            number = self._free.pop()
            self._stems[number] = stem
        else:
            number = len(self._stems)
            self._stems.append(stem)
            if number >= len(self.parent):
                self.parent = _grown(self.parent, number)
                self.end = _grown(self.end, number)
                self._holders = _grown(self._holders, number)
        self.parent[number] = parent
        self.end[number] = stem.end
        self._holders[number] = 0
        self._stem(parent).children[int(pages[0])] = number
        return number

    def _drop(self, number: int) -> None:
        self._stems[number] = None
        self._free.append(number)

    def _split(self, number: int, length: int) -> int:
        """Put a new stem of `length` pages above the stem `number`, which keeps the rest; returns
        the new stem."""
        stem = self._stem(number)
        upper = self._add(stem.parent, stem.pages[:length], stem.first)
        above = self._stem(upper)
        self._holders[upper] = self._holders[number]
        stem.pages, stem.first, stem.parent = stem.pages[length:], stem.first + length, upper
        self.parent[number] = upper
        above.children[int(stem.pages[0])] = number
        return upper

    def _join_only_child(self, number: int) -> None:
        """Join a stem with its only child if no sequence ends at the stem: both have the same
        holders."""
        stem = self._stem(number)
        (child,) = stem.children.values()
        node = self._stem(child)
        node.pages = np.concatenate([stem.pages, node.pages])
        node.first, node.parent = stem.first, stem.parent
        self.parent[child] = stem.parent
        self._stem(stem.parent).children[int(node.pages[0])] = child
        self._drop(number)


def _grown(array: Int32s, index: int) -> Int32s:
    grown = np.zeros(max(2 * len(array), index + 1), np.int32)
    grown[: len(array)] = array
    return grown
