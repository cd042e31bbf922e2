"""Names of pages: equal prefixes have equal names, branches have names of their own."""

import numpy as np

from mainstem.kv.keys import PageChain, root_key

ROOT = root_key(b"model", 4, b"")
IDS = np.arange(18, dtype=np.int32)


def test_a_branch_renames_what_follows_and_nothing_before() -> None:
    plain = PageChain.of(ROOT, 4, IDS)
    branch = plain.branched(2, b"mark").extended(IDS)
    assert branch.keys[:2] == plain.keys[:2]
    assert set(branch.keys[2:]).isdisjoint(plain.keys)
    assert len(branch.keys) == 4
    assert branch.parent(2) not in plain.keys
    assert branch.parent(3) == branch.keys[2]


def test_branches_differ_by_mark_and_place_and_equal_ones_are_equal() -> None:
    plain = PageChain.of(ROOT, 4, IDS)
    names = [plain.branched(n, mark).extended(IDS).keys[-1] for n in (0, 1) for mark in (b"a", b"")]
    assert len({*names, plain.keys[-1]}) == 5
    again = plain.extended(np.append(IDS, IDS)).branched(1, b"a").extended(IDS)
    assert again.keys[-1] == names[2]


def test_a_branch_can_branch_again() -> None:
    once = PageChain.of(ROOT, 4, IDS).branched(1, b"a").extended(IDS)
    twice = once.branched(2, b"b").extended(IDS)
    assert twice.keys[:2] == once.keys[:2]
    assert twice.keys[2:] != once.keys[2:]
    at_once = once.branched(1, b"b").extended(IDS)
    assert at_once.keys[1] != once.keys[1], "the first mark counts, too"
    assert at_once.keys[1] != PageChain.of(ROOT, 4, IDS).branched(1, b"b").extended(IDS).keys[1]
