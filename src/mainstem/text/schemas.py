"""JSON schemas whose objects have only the properties that they declare."""

from collections.abc import Iterator, Mapping

from mainstem.core.json import JsonView

NO_ARGUMENTS: JsonView = {"type": "object", "properties": {}, "additionalProperties": False}
# keywords whose values are schemas by name, or a schema or list of schemas
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
NESTED = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf")
# keywords that describe the same object as the schema in which they are
_PARTS = ("allOf", "anyOf", "oneOf", "$ref")
_SHAPES = ("properties", "patternProperties", "additionalProperties", *_PARTS)


def closed(schema: JsonView) -> dict[str, object]:
    """Return a schema that allows no other properties than those it declares.

    {"properties": {"a": {}}} -> {"properties": {"a": {}}, "additionalProperties": False}

    A schema that sets `additionalProperties` keeps it. Schemas that describe a part of an object
    (in an `allOf`, for example) stay open, since each part declares only some of the properties.
    """
    made = _closed(schema, "#", frozenset(_refs_of_parts(schema)))
    assert isinstance(made, dict)
    return made


def arguments_schema(parameters: object) -> JsonView:
    """Return the schema of a function's arguments, closed. Without any parameters, the arguments
    are an empty object."""
    if not isinstance(parameters, Mapping):
        return NO_ARGUMENTS
    if not parameters.get("required") and not any(name in parameters for name in _SHAPES):
        return NO_ARGUMENTS
    return closed({"type": "object", **parameters})


def _closed(schema: object, path: str, parts: frozenset[str]) -> object:
    """`path`: where the schema is, as in "$ref"; `parts`: paths of schemas that must stay open."""
    if isinstance(schema, list):
        return [_closed(each, f"{path}/{place}", parts) for place, each in enumerate(schema)]
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    if path in parts:
        return made
    for name, value in schema.items():
        if name in BY_NAME and isinstance(value, Mapping):
            made[name] = {
                key: _closed(each, f"{path}/{name}/{_escaped(key)}", parts)
                for key, each in value.items()
            }
        elif name in NESTED and not _is_part(name, schema):
            made[name] = _closed(value, f"{path}/{name}", parts)
    if "additionalProperties" not in schema and _is_whole(schema):
        made["additionalProperties"] = False
    return made


def _is_part(name: str, schema: JsonView) -> bool:
    """Whether a keyword describes only a part of an object, because others describe it too."""
    if name not in _PARTS:
        return False
    others = ("properties", "patternProperties", *_PARTS)
    return name == "allOf" or any(other in schema for other in others if other != name)


def _escaped(key: object) -> str:
    """A key as it is written in a "$ref"."""
    return str(key).replace("~", "~0").replace("/", "~1")


def _is_whole(schema: JsonView) -> bool:
    """Whether a schema declares all properties of an object: those it requires, too, and no others
    in schemas for parts of the object."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    has_parts = any(
        shape in part
        for name in ("anyOf", "oneOf")
        for part in _children(schema.get(name))
        if isinstance(part, Mapping)
        for shape in _SHAPES
    )
    is_joined = has_parts or "allOf" in schema or "$ref" in schema
    return not is_joined and all(name in properties for name in required)


def _refs_of_parts(value: object) -> Iterator[str]:
    """Yield each "$ref" to a schema that describes a part of an object."""
    if isinstance(value, Mapping):
        for name in _PARTS:
            if _is_part(name, value):
                yield from _refs({name: value.get(name)})
    for child in _children(value):
        yield from _refs_of_parts(child)


def _refs(value: object) -> Iterator[str]:
    if isinstance(value, Mapping) and isinstance(ref := value.get("$ref"), str):
        yield ref
    for child in _children(value):
        yield from _refs(child)


def _children(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []
