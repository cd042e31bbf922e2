"""Many engines, on Ray (docs/scale.md). Ray is an extra: pip install 'mainstem[ray]'.

workers.py  actors that answer a batch job's rows: `mainstem batch --ray`
data.py     Generate and plan, for Ray Data
tables.py   MapRows and map_rows: a prompt for every row of a Dataset
serve_app.py  a Ray Serve application: replicas (replica.py) behind a front (front.py, prompts.py)
router.py   which replica answers a request, by what each holds (holdings.py); needs no Ray
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mainstem.ray.data import Generate, plan
    from mainstem.ray.tables import MapRows, map_rows

__all__ = ["Generate", "MapRows", "map_rows", "plan"]

# imported on first use, so that Ray Data does not need Ray Serve's packages, and vice versa
_LAZY = {
    "Generate": "mainstem.ray.data",
    "MapRows": "mainstem.ray.tables",
    "map_rows": "mainstem.ray.tables",
    "plan": "mainstem.ray.data",
}


def __getattr__(name: str) -> object:
    """Lazy imports."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)
