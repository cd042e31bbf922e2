"""Every item, paper by paper."""

from mainstem.core.errors import ConfigError
from mainstem.core.spelling import did_you_mean
from mainstem_bench.paper import attentionstore, batchllm, relay
from mainstem_bench.paper.item import Item

PAPERS = {
    "RelayAttention": relay.ITEMS,
    "AttentionStore": attentionstore.ITEMS,
    "BatchLLM": batchllm.ITEMS,
}
ITEMS: dict[str, Item] = {item.name: item for items in PAPERS.values() for item in items}


def find_items(names: list[str]) -> list[Item]:
    """Return the items of these names; `all` stands for every item, `relay` for the items of that
    paper."""
    found: dict[str, Item] = {}
    for name in names:
        chosen = [
            item for item in ITEMS.values() if name in ("all", item.name, item.name.split("-")[0])
        ]
        if not chosen:
            hint = did_you_mean(name, ITEMS)
            raise ConfigError(f"no item {name!r}.{hint} `mainstem bench paper --list` shows all")
        found |= {item.name: item for item in chosen}
    return list(found.values())
