"""JSON schemas for llguidance, which refuses some legal ones and does not know all keywords.

    schema --lowered--> schema that llguidance enforces, and whether the answer must be checked
    answer, schema --broken_rule--> the first place where `uniqueItems` or `propertyNames` is broken

`propertyNames` with a list of names (pydantic's dict[Enum, ...]) becomes `properties`, and a
pattern for names becomes `patternProperties`. `uniqueItems` of up to four options (pydantic's
set[Enum]) becomes the list of all sets. Limits of the length of names, and `uniqueItems` of other
items (set[str]), are left out of the form. They are checked when the answer is complete.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations

from mainstem.core.json import Json, JsonView
from mainstem.text.schemas import BY_NAME, NESTED

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_NAME_RULES = ("type", "enum", "const", "minLength", "maxLength", "title", "description")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
MAX_SET = 4  # options of a set whose lists are all written out, 65 at most
_NOTES = ("title", "description", "default", "examples")
_SET_RULES = {"type", "items", "uniqueItems", "minItems", "maxItems", "$defs", *_NOTES}
_MAX_DEPTH = 64  # of references in a schema
_MAX_VISITS = 20_000  # values that are compared with schemas in one check


@dataclass(slots=True)
class Lowered:
    """A schema for llguidance. `must_check`: answers may break keywords that it does not know."""

    schema: Json
    must_check: bool = False


def lowered(schema: JsonView) -> Lowered:
    """Return the schema for llguidance."""
    made = Lowered({})
    made.schema = _lowered_object(schema, schema, made)
    return made


def _lowered(schema: object, root: JsonView, made: Lowered) -> object:
    return _lowered_object(schema, root, made) if isinstance(schema, Mapping) else schema


def _lowered_object(schema: JsonView, root: JsonView, made: Lowered) -> Json:
    low: Json = {}
    for name, value in schema.items():
        if name in BY_NAME and isinstance(value, Mapping):
            low[name] = {key: _lowered(each, root, made) for key, each in value.items()}
        elif name in NESTED or name in _LISTS:
            if isinstance(value, list):
                low[name] = [_lowered(each, root, made) for each in value]
            else:
                low[name] = _lowered(value, root, made)
        elif name in _COUNTS and isinstance(value, float) and value.is_integer():
            low[name] = int(value)  # 1.0 is an integer in JSON schemas
        elif name == "uniqueItems" and isinstance(value, bool):
            if value and (alone := _set_of_few(schema, root)) is not None:
                return alone
            made.must_check |= value
        elif name != "propertyNames":
            low[name] = value
    if "propertyNames" in schema:
        _lower_names(low, _resolved(schema["propertyNames"], root), made)
    return low


def _set_of_few(schema: JsonView, root: JsonView) -> Json | None:
    """The lists without a repetition of a few options, one alternative each; None: the items are
    not given as options, there are more than MAX_SET, or the list has other rules."""
    items = _resolved(schema.get("items"), root)
    if set(schema) - _SET_RULES or not isinstance(items, Mapping):
        return None
    values = [items["const"]] if "const" in items else items.get("enum")
    if not isinstance(values, list) or not set(items) <= {"type", "enum", "const", *_NOTES}:
        return None
    if "type" in items and not (items["type"] == "string" and _are_texts(values)):
        return None
    by_text = {json.dumps(each, sort_keys=True): each for each in values}
    least, most = schema.get("minItems", 0), schema.get("maxItems", MAX_SET)
    if not isinstance(least, int | float) or not isinstance(most, int | float):
        return None  # llguidance refuses it
    if len(by_text) > MAX_SET:
        return None
    lists = [
        list(chosen)
        for count in range(len(by_text) + 1)
        if least <= count <= most
        for chosen in permutations(by_text.values(), count)
    ]
    kept = {name: schema[name] for name in ("$defs",) if name in schema}
    return kept | {"anyOf": [_exact_list(each) for each in lists]} if lists else None


def _exact_list(values: list[object]) -> Json:
    places = [{"const": each} for each in values]
    return {"type": "array", "prefixItems": places, "items": False, "minItems": len(values)}


def _lower_names(low: Json, names: object, made: Lowered) -> None:
    """Put `propertyNames` into the other keywords of an object, or note that it must be checked."""
    options = _options(names)
    properties = low.get("properties", {})
    if names is True or (isinstance(names, Mapping) and not _rules(names)):
        return
    is_free = not properties and "patternProperties" not in low
    if isinstance(names, Mapping) and set(_rules(names)) == {"pattern"} and is_free:
        low["patternProperties"] = {names["pattern"]: low.get("additionalProperties", True)}
        low["additionalProperties"] = False
    elif not isinstance(names, Mapping) or not set(names) <= {*_NAME_RULES, "$defs"}:
        low["propertyNames"] = names  # llguidance refuses it by name
    elif options is None or "patternProperties" in low or not isinstance(properties, Mapping):
        made.must_check = True
    else:
        other = low.get("additionalProperties", True)
        named = {name: properties.get(name, other) for name in options}
        low["properties"] = {name: each for name, each in named.items() if each is not False}
        low["additionalProperties"] = False


def _rules(names: JsonView) -> JsonView:
    """What a schema for names demands, apart from being texts."""
    return {
        key: each for key, each in names.items()
        if key not in ("title", "description", "$defs") and (key, each) != ("type", "string")
    }  # fmt: skip


def _options(names: object) -> list[str] | None:
    """The names that a schema allows; None: not given as a list."""
    if not isinstance(names, Mapping):
        return None
    options = [names["const"]] if "const" in names else names.get("enum")
    if not isinstance(options, list) or not _are_texts(options):
        return None
    return [each for each in options if _breaks_name(each, names) is None]


def _are_texts(values: list[object]) -> bool:
    return all(isinstance(each, str) for each in values)


def _resolved(schema: object, root: JsonView) -> object:
    """The schema that a chain of references ends at; None if it does not exist."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(ref := schema.get("$ref"), str):
            return schema
        schema = _at(root, ref)
    return None


def _at(root: JsonView, ref: str) -> object:
    found: object = root
    if not ref.startswith("#"):
        return None
    for part in ref[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found


# --- complete answers ----------------------------------------------------------------------------


def broken_rule(text: str | bytes, schema: JsonView) -> str | None:
    """Return where JSON that fits a schema's form breaks `uniqueItems` or `propertyNames`, and
    how; None if it does not, or if it fits another alternative of an `anyOf`."""
    try:
        return next(_Check(schema).broken(json.loads(text), schema, "", 0), None)
    except (RecursionError, _TooMuch):
        return "it is too large or too deep to be checked for uniqueItems and propertyNames"


class _TooMuch(Exception):
    """A check takes too long."""


class _Check:
    """One check of a value against a schema; both come from clients, so its work is limited."""

    def __init__(self, root: JsonView) -> None:
        self._root = root
        self._num_left = _MAX_VISITS

    def broken(self, value: object, schema: object, path: str, depth: int) -> Iterator[str]:
        """Yield each rule that a value breaks. `depth`: references and alternatives passed."""
        self._num_left -= 1
        if self._num_left < 0:
            raise _TooMuch
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return
        if isinstance(ref := schema.get("$ref"), str):
            yield from self.broken(value, _at(self._root, ref), path, depth + 1)
        for part in _listed(schema, "allOf"):
            yield from self.broken(value, part, path, depth + 1)
        for name in ("anyOf", "oneOf"):
            yield from self._broken_by_all(value, _listed(schema, name), path, depth)
        if isinstance(value, list):
            yield from self._list(value, schema, path, depth)
        elif isinstance(value, dict):
            yield from self._object(value, schema, path, depth)

    def _broken_by_all(
        self, value: object, parts: list[object], path: str, depth: int
    ) -> Iterator[str]:
        """What one alternative forbids counts only if every alternative forbids something."""
        found = [next(self.broken(value, part, path, depth + 1), None) for part in parts]
        told = [each for each in found if each is not None]
        if found and len(told) == len(found):
            yield told[0]

    def _list(self, value: list[object], schema: JsonView, path: str, depth: int) -> Iterator[str]:
        if schema.get("uniqueItems") is True:
            counts = Counter(json.dumps(each, sort_keys=True) for each in value)
            for twice, count in counts.most_common(1):
                if count > 1:
                    yield f"{path or 'the list'}: uniqueItems: {twice:.80} occurs twice"
        first = _listed(schema, "prefixItems")
        for place, item in enumerate(value):
            part = first[place] if place < len(first) else schema.get("items")
            yield from self.broken(item, part, f"{path}[{place}]", depth)

    def _object(self, value: Json, schema: JsonView, path: str, depth: int) -> Iterator[str]:
        names = _resolved(schema.get("propertyNames"), self._root)
        properties, patterns = schema.get("properties"), schema.get("patternProperties")
        others = [*patterns.values()] if isinstance(patterns, Mapping) else []
        others.append(schema.get("additionalProperties"))
        for name, each in value.items():
            if (reason := _breaks_name(name, names)) is not None:
                yield f"{path or 'the object'}: propertyNames: {name!r:.80} {reason}"
            place = f"{path}.{name}" if path else name
            if isinstance(properties, Mapping) and name in properties:
                yield from self.broken(each, properties[name], place, depth)
            else:
                yield from self._broken_by_all(each, others, place, depth)


def _breaks_name(name: str, names: object) -> str | None:
    if not isinstance(names, Mapping):
        return "is not allowed" if names is False else None
    least, most = names.get("minLength", 0), names.get("maxLength", len(name))
    if isinstance(least, int | float) and len(name) < least:
        return "is too short"
    if isinstance(most, int | float) and len(name) > most:
        return "is too long"
    options = [names["const"]] if "const" in names else names.get("enum")
    return "is not one of the names" if isinstance(options, list) and name not in options else None


def _listed(schema: JsonView, name: str) -> list[object]:
    found = schema.get(name)
    return found if isinstance(found, list) else []
