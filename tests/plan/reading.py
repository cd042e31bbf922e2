"""How tests read plans: groups as records, paths of nodes, and files of lines."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from mainstem.core.plan import PLAN_FORMAT, Plan


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Prompts that are run as a unit because they share their first `prefix_tokens` tokens."""

    members: tuple[int, ...]  # prompt indices, in the order to run
    prefix_tokens: int


def group_of(plan: Plan, index: int) -> PrefixGroup:
    """One group as a record."""
    members = plan.members[plan.group_starts[index] : plan.group_starts[index + 1]]
    return PrefixGroup(tuple(members.tolist()), int(plan.node_tokens[plan.group_nodes[index]]))


def path_to(plan: Plan, node_index: int) -> list[int]:
    """The nodes from below the root to `node_index`, in the order in which they are computed."""
    path: list[int] = []
    while node_index:
        path.append(node_index)
        node_index = int(plan.node_parents[node_index])
    return path[::-1]


def are_equal(plan: Plan, other: Plan) -> bool:
    """Whether both plans have the same arrays."""
    names = [field.name for field in fields(plan)]
    return all(np.array_equal(getattr(plan, name), getattr(other, name)) for name in names)


def read_plan(lines: Iterable[str]) -> Plan:
    """Reads what `Plan.to_lines` wrote."""
    head, *rows = (json.loads(line) for line in lines)
    assert head["plan_format"] == PLAN_FORMAT
    nodes, groups = rows[: head["nodes"]], rows[head["nodes"] :]
    assert len(groups) == head["groups"]
    sizes = [len(group["members"]) for group in groups]
    plan = Plan(
        members=np.array([m for group in groups for m in group["members"]], np.int64),
        member_nodes=np.array([n for group in groups for n in group["member_nodes"]], np.int64),
        group_starts=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64),
        group_nodes=np.array([group["node"] for group in groups], np.int64),
        node_parents=np.array([node["parent"] for node in nodes], np.int64),
        node_tokens=np.array([node["tokens"] for node in nodes], np.int64),
        node_begins=np.array([node["begin"] for node in nodes], np.int64),
        node_ends=np.array([node["end"] for node in nodes], np.int64),
        node_is_span=np.array([node["span"] for node in nodes], np.bool_),
    )
    assert len(plan.members) == head["prompts"]
    return plan
