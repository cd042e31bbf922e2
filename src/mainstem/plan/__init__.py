"""A whole workload seen at once (BatchLLM): all prompts -> tree -> groups -> ordered Plan.

planner.py      plan_prompts: the one call, and its settings
prefix_tree.py  all prompts -> tree of shared prefixes
groups.py       which prefixes are worth sharing -> groups and spans
order.py        order of groups by expected output length -> Plan
cut.py          a plan cut into bundles for many workers
saving.py       token saving ratios, and what an LRU cache would reach
"""
