"""The types of JSON objects."""

from collections.abc import Mapping
from typing import Any

Json = dict[str, object]
JsonView = Mapping[str, object]  # an object that is only read
AnyJson = dict[str, Any]  # an object whose form the reader knows: nothing is checked
