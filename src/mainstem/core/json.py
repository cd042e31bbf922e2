"""The types of JSON objects."""

from collections.abc import Mapping

Json = dict[str, object]
JsonView = Mapping[str, object]  # an object that is only read
