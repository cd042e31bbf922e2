"""A known workload and the Plan to run it, as plain arrays.

    prompts        token_ids  | prompt 0 | prompt 1    | prompt 2 | ...
                   starts     0          7             19         24

    members        | group 0: prompts 4 9 2 | group 1: prompts 0 1 7 5 3 | ...
    group_starts   0                        3                            8
    nodes            [----- node 1 -------]   [------- node 2 --------]
                                                [- node 3 -]

A node is a run of tokens that several prompts have in common; it covers the members
`node_begins[v]:node_ends[v]`. Node ranges nest, so a node's pages are needed from its first member
to its last and never again.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mainstem.core.errors import InvalidRequest

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]
Bools = NDArray[np.bool_]

PLAN_FORMAT = 1


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """The token ids of a whole workload: prompt i is `token_ids[starts[i]:starts[i + 1]]`.

    `starts` is int64 because a workload may hold more than 2**31 tokens.
    """

    token_ids: Int32s
    starts: Int64s

    def __post_init__(self) -> None:
        starts = self.starts
        if self.token_ids.ndim != 1 or self.token_ids.dtype != np.int32:
            raise InvalidRequest("token_ids", "must be one row of int32")
        if starts.ndim != 1 or starts.dtype != np.int64 or len(starts) == 0:
            raise InvalidRequest("starts", "must be one row of int64, one longer than the prompts")
        if starts[0] != 0 or starts[-1] != len(self.token_ids) or np.any(starts[1:] < starts[:-1]):
            raise InvalidRequest("starts", "must rise from 0 to the number of token ids")

    @classmethod
    def from_lists(cls, prompts: Iterable[Iterable[int]]) -> "Prompts":
        """Copy Python lists. This is slow for large workloads: pass arrays to the constructor
        instead."""
        rows = [np.fromiter(prompt, dtype=np.int32) for prompt in prompts]
        starts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=starts[1:])
        return cls(np.concatenate([*rows, np.empty(0, np.int32)]), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Int32s:
        return self.token_ids[self.starts[index] : self.starts[index + 1]]

    @property
    def num_tokens(self) -> Int64s:
        """[prompts] the length of every prompt."""
        return np.diff(self.starts)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Ordered groups of prompts that share a prefix, and the tree of what they share.

    Nodes are in preorder: node 0 is the root, which has no tokens and is its own parent; every
    other node comes after its parent. `node_tokens` is a node's depth: the tokens from the start of
    the prompt to the end of the node. The first `node_tokens[member_nodes[i]]` tokens of member i's
    prompt are shared, the rest are its own. The prefix of group g is `group_nodes[g]`.
    """

    members: Int64s  # [prompts] prompt indices in the order to run
    member_nodes: Int64s  # [prompts] the deepest node of each member
    group_starts: Int64s  # [groups + 1] prefix sums over members
    group_nodes: Int64s  # [groups]
    node_parents: Int64s  # [nodes]
    node_tokens: Int64s  # [nodes]
    node_begins: Int64s  # [nodes] first member
    node_ends: Int64s  # [nodes] one past the last member
    node_is_span: Bools  # [nodes] whether it was a span when groups were formed

    @property
    def num_groups(self) -> int:
        return len(self.group_nodes)

    @property
    def node_runs(self) -> Int64s:
        """[nodes] the number of tokens a node adds to its parent; each of them is computed once."""
        return self.node_tokens - self.node_tokens[self.node_parents]

    def check(self, prompts: Prompts) -> None:
        """Raise if this is not a plan for `prompts`: each prompt occurs once, and every node is
        really shared."""
        count, num_nodes = len(prompts), len(self.node_tokens)
        assert np.array_equal(np.sort(self.members), np.arange(count)), "prompts missing or twice"
        assert self.group_starts[0] == 0, "the first group does not start at the first member"
        assert self.group_starts[-1] == count, "the last group does not end at the last member"
        assert np.all(np.diff(self.group_starts) > 0), "a group is empty"
        assert self.node_parents[0] == 0, "node 0 is not the root"
        assert self.node_tokens[0] == 0, "the root has tokens"
        below = np.arange(1, num_nodes)
        assert np.all(self.node_parents[1:] < below), "a node precedes its parent"
        assert np.all(self.node_runs[1:] > 0), "a node adds nothing"
        parents = self.node_parents
        assert np.all(self.node_begins >= self.node_begins[parents]), "a node leaves its parent"
        assert np.all(self.node_ends <= self.node_ends[parents]), "a node leaves its parent"
        position = np.arange(count)
        assert np.all(self.node_begins[self.member_nodes] <= position), "a member left its node"
        assert np.all(self.node_ends[self.member_nodes] > position), "a member left its node"
        group_of = np.repeat(np.arange(self.num_groups), np.diff(self.group_starts))
        nodes = self.group_nodes[group_of]
        assert np.all(self.node_begins[nodes] <= position), "a group left its node"
        assert np.all(self.node_ends[nodes] > position), "a group left its node"
        shared = self.node_tokens[self.member_nodes]
        assert np.all(shared <= prompts.num_tokens[self.members]), "a prefix exceeds its prompt"
        for node in below.tolist():
            first, *others = self.members[self.node_begins[node] : self.node_ends[node]].tolist()
            tokens = int(self.node_tokens[node])
            prefix = prompts[first][:tokens]
            for other in others:
                assert np.array_equal(prefix, prompts[other][:tokens]), "prompts of a node differ"

    def to_lines(self) -> Iterator[str]:
        """Return the plan as JSON lines that can be diffed: a head, then one line per node and per
        group."""
        counts = {"prompts": len(self.members), "nodes": len(self.node_tokens)}
        yield json.dumps({"plan_format": PLAN_FORMAT, **counts, "groups": self.num_groups})
        nodes = (self.node_parents, self.node_tokens, self.node_begins, self.node_ends)
        rows = zip(*(column.tolist() for column in nodes), self.node_is_span.tolist(), strict=True)
        for parent, tokens, begin, end, is_span in rows:
            row = {"parent": parent, "tokens": tokens, "begin": begin, "end": end, "span": is_span}
            yield json.dumps(row)
        member_nodes = self.member_nodes
        for index in range(self.num_groups):
            begin, end = self.group_starts[index : index + 2].tolist()
            row = {
                "node": int(self.group_nodes[index]),
                "members": self.members[begin:end].tolist(),
            }
            yield json.dumps(row | {"member_nodes": member_nodes[begin:end].tolist()})
