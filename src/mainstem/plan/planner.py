"""From all prompts to a Plan in one call."""

from dataclasses import dataclass, field

import numpy as np

from mainstem.core.errors import ConfigError
from mainstem.core.plan import Int64s, Plan, Prompts
from mainstem.plan.groups import LongRuns, SpanChoice, first_level_enlarged, multi_level
from mainstem.plan.order import OutputEstimate, lay_out, templates_of
from mainstem.plan.prefix_tree import PrefixTree, build_tree


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """How prompts are grouped, and whether groups are put in another order."""

    levels: int = 4  # most spans on one path; 1: the paper's single level by Algorithm 1
    group_tokens: int = 65_536  # distinct tokens in a group; larger groups are split if possible
    worth_span: SpanChoice = field(default_factory=LongRuns)
    reorders: bool = (
        True  # by R_group (plan/order.py); False: in the order of the groups' first prompts
    )

    def __post_init__(self) -> None:
        if self.levels < 1:
            raise ConfigError(f"levels must be at least 1, got {self.levels}")
        if self.group_tokens < 1:
            raise ConfigError(f"group_tokens must be positive, got {self.group_tokens}")


def plan_prompts(
    prompts: Prompts,
    config: PlanConfig | None = None,
    max_tokens: Int64s | None = None,
    estimate: OutputEstimate | None = None,
) -> Plan:
    """The Plan of a whole workload.

    `max_tokens` [prompts] are the limits on the outputs; without them all outputs count as equally
    long (Eq. 4). The estimate's templates are those of `templates_of`.
    """
    return plan_tree(build_tree(prompts), config, max_tokens, estimate)


def plan_tree(
    tree: PrefixTree,
    config: PlanConfig | None = None,
    max_tokens: Int64s | None = None,
    estimate: OutputEstimate | None = None,
) -> Plan:
    """Like `plan_prompts`, for a tree that exists already."""
    config = config or PlanConfig()
    limits = np.ones(len(tree.order), dtype=np.int64) if max_tokens is None else max_tokens
    expected = (estimate or OutputEstimate()).expect(templates_of(tree), limits)
    if not config.reorders:
        expected = np.zeros(len(limits))  # equal ratios keep their order
    if config.levels == 1:
        draft = first_level_enlarged(tree)
    else:
        draft = multi_level(tree, config.worth_span, config.levels, config.group_tokens)
    prompt_tokens = np.empty(len(tree.order), dtype=np.int64)
    prompt_tokens[tree.order] = tree.prompt_tokens
    return lay_out(draft, prompt_tokens, expected)
