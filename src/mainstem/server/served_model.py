"""The model of a server, as its clients know it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the model is called; the first name is the one replies use by default.

    `sampling` has fields of SamplingParams for requests that do not say.
    """

    names: tuple[str, ...]
    created: int
    sampling: Mapping[str, object] = field(default_factory=dict)
