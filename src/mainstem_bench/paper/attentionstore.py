"""Items."""

from mainstem_bench.paper.item import Item

ITEMS: tuple[Item, ...] = ()
