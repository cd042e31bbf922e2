"""Names of pages: equal prefixes have equal names, and branches have different names."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mainstem.core.step import Int32s
from mainstem.kv import keys
from mainstem.kv.keys import PageChain, root_key

ROOT = root_key(b"model", 4, b"")
IDS = np.arange(18, dtype=np.int32)


def test_a_branch_renames_later_pages_only() -> None:
    plain = PageChain.of(ROOT, 4, IDS)
    branch = plain.branched(2, b"mark").extended(IDS)
    assert branch.keys[:2] == plain.keys[:2]
    assert set(branch.keys[2:]).isdisjoint(plain.keys)
    assert len(branch.keys) == 4
    assert branch.parent(2) not in plain.keys
    assert branch.parent(3) == branch.keys[2]


def test_names_of_a_branch_depend_on_its_mark_and_place_only() -> None:
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


@given(
    hnp.arrays(np.int32, st.integers(0, 30), elements=st.integers(0, 1)),
    hnp.arrays(np.int32, st.integers(0, 30), elements=st.integers(0, 1)),
)
def test_keys_are_the_same_with_and_without_a_neighbour_chain(ids: Int32s, others: Int32s) -> None:
    neighbour = PageChain.of(ROOT, 4, others)
    assert PageChain.of(ROOT, 4, ids, neighbour).keys == PageChain.of(ROOT, 4, ids).keys


def test_pages_shared_with_a_neighbour_chain_are_not_hashed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    neighbour = PageChain.of(ROOT, 4, IDS)
    plain = neighbour.extended(np.append(IDS, IDS))
    monkeypatch.setattr(keys, "sha256", None)
    assert PageChain.of(ROOT, 4, IDS, neighbour).keys == neighbour.keys
    with pytest.raises(TypeError):
        PageChain.of(ROOT, 4, plain.token_ids, neighbour)


def test_a_neighbour_of_another_root_or_with_a_branch_is_ignored() -> None:
    other = root_key(b"model", 4, b"another tenant")
    chain = PageChain.of(ROOT, 4, IDS)
    assert PageChain.of(other, 4, IDS, chain).keys[0] != chain.keys[0]
    branched = chain.branched(1, b"a").extended(IDS)
    assert PageChain.of(ROOT, 4, IDS, branched).keys == chain.keys


@given(data=st.data(), page_size=st.sampled_from([1, 2, 4]))
def test_common_tokens_are_those_before_the_first_difference(
    data: st.DataObject, page_size: int
) -> None:
    lists = st.lists(st.integers(0, 1), max_size=14)
    one, two = (np.array(data.draw(lists), np.int32) for _ in range(2))
    length = min(len(one), len(two))
    same = one[:length] == two[:length]
    expected = length if same.all() else int(same.argmin())
    chains = [PageChain.of(root_key(b"m", page_size, b""), page_size, ids) for ids in (one, two)]
    assert chains[0].num_common(chains[1]) == chains[1].num_common(chains[0]) == expected


def test_chains_of_two_tenants_have_no_common_tokens_after_the_public_ones() -> None:
    ids = np.arange(10, dtype=np.int32)
    public = PageChain.of(root_key(b"m", 2, b""), 2, ids[:4])
    one, two = (public.branched(2, salt).extended(ids) for salt in (b"one", b"two"))
    assert one.num_common(two) == 4
    others = [PageChain.of(root_key(b"m", 2, salt), 2, ids) for salt in (b"one", b"two")]
    assert others[0].num_common(others[1]) == 0
    assert one.num_common(replace(one)) == 10
