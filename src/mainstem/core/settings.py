"""One description of each setting, from which flags, config files, the arguments of LLM and
docs/settings.md are made.

    page_size: int = setting(16, "tokens per page", range=POWER_OF_TWO)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from mainstem.core.errors import ConfigError

T = TypeVar("T")

ABOUT = "about"  # the key of an About in a field's metadata


@dataclass(frozen=True, slots=True)
class Range:
    """The allowed values of a setting, as words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def at_least(low: int) -> Range:
    return Range(f"at least {low}", lambda value: value >= low)


POWER_OF_TWO = Range(
    "a power of two, at most 1024", lambda value: 1 <= value <= 1024 and not value & (value - 1)
)
SHARE = Range("above 0 and at most 1", lambda value: 0.0 < value <= 1.0)
PART = Range("between 0 and 1", lambda value: 0.0 < value < 1.0)
POSITIVE = Range("a number above 0", lambda value: isfinite(value) and value > 0)
NOT_NEGATIVE = Range("a number of at least 0", lambda value: isfinite(value) and value >= 0)
BITS_64 = Range(
    "a whole number of 64 bits",
    lambda value: isinstance(value, int) and -(2**63) <= value < 2**63,
)
LAYERS = Range("auto, all or a number", lambda value: value in ("auto", "all") or value.isdecimal())


@dataclass(frozen=True, slots=True)
class About:
    """The description of a setting, without its name, type and default."""

    help: str  # the default is appended to it
    unset: str  # what happens if it is None
    range: Range | None
    metavar: str | None  # in `--help`; None: chosen by the setting's type
    argument: str | None  # name of the flag and of LLM's argument; None: the setting's name
    has_flag: bool
    choices: tuple[str, ...] | None  # what users may set, if code may set more; see Setting


def setting(
    default: T,
    help: str,
    *,
    unset: str = "",
    range: Range | None = None,
    metavar: str | None = None,
    argument: str | None = None,
    has_flag: bool = True,
    choices: tuple[str, ...] | None = None,
) -> T:
    """A field of a section; see About."""
    said = About(help, unset, range, metavar, argument, has_flag, choices)
    return field(default=default, metadata={ABOUT: said})


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: a row of the table in docs/settings.md."""

    section: str
    name: str  # in the section and in a config file
    kind: type[object]
    is_optional: bool
    default: object
    about: About

    @property
    def argument(self) -> str:
        """Its name as an argument of LLM and as an attribute of parsed flags."""
        return self.about.argument or self.name

    @property
    def flag(self) -> str | None:
        return f"--{self.argument.replace('_', '-')}" if self.about.has_flag else None

    @property
    def metavar(self) -> str | None:
        """The placeholder for its value in `--help`; None: its name."""
        return self.about.metavar or {int: "N", float: "X"}.get(self.kind)

    @property
    def choices(self) -> list[str] | None:
        """The values that users may set: those listed, or those of an enum; None: any value in
        range."""
        if self.about.choices is not None:
            return list(self.about.choices)
        if not issubclass(self.kind, Enum):
            return None
        return [str(member.value) for member in self.kind]

    @property
    def shown_default(self) -> str:
        """The default as it is written in a config file; for None, what None means."""
        if self.default is None:
            return self.about.unset
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return str(self.default.value if isinstance(self.default, Enum) else self.default)

    def read(self, value: object, where: str) -> object:
        """Convert a value from a file, a flag or an argument to the setting's type; raises
        ConfigError if the type is wrong."""
        must = f"{where}: {self.name} must be"
        if self.choices is not None:
            given = value.value if isinstance(value, Enum) else value
            if given not in self.choices:
                raise ConfigError(f"{must} one of {self.choices}, got {value!r}")
            return self.kind(given)  # type: ignore[call-arg]  # an enum or str
        if value is None and self.is_optional:
            return None
        if self.kind is bool and not isinstance(value, bool):
            raise ConfigError(f"{must} true or false, got {value!r}")
        if self.kind is str and isinstance(value, Path):
            return str(value)
        if self.kind is tuple:
            return self._read_names(value, must)
        allowed = (int, float) if self.kind is float else self.kind
        is_number = isinstance(value, bool) and self.kind is not bool
        if is_number or not isinstance(value, allowed):
            raise ConfigError(f"{must} {self.kind.__name__}, got {value!r}")
        return value

    def _read_names(self, value: object, must: str) -> tuple[str, ...]:
        """Return the names in a text with commas, or in a list of such texts."""
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, Sequence) or not all(isinstance(item, str) for item in given):
            raise ConfigError(f"{must} names with commas between them, or a list, got {value!r}")
        names = [name.strip() for item in given for name in item.split(",")]
        return tuple(name for name in names if name)


def settings_of(section_name: str, section: type[Any]) -> Iterator[Setting]:
    """The rows of a section."""
    hints = get_type_hints(section)
    for each in fields(section):
        kinds = get_args(hints[each.name]) or (hints[each.name],)
        (kind,) = (kind for kind in kinds if kind is not NoneType)
        said = each.metadata[ABOUT]
        kind = get_origin(kind) or kind  # tuple[str, ...] is a tuple
        yield Setting(section_name, each.name, kind, NoneType in kinds, each.default, said)


def check_ranges(section: Any) -> None:
    """Raise ConfigError if a value of a section is out of its range."""
    for each in fields(section):
        value, said = getattr(section, each.name), each.metadata[ABOUT]
        is_open = value is None and each.default is None
        if said.range is not None and not is_open and not said.range.holds(value):
            raise ConfigError(f"{each.name} must be {said.range.words}, got {value!r}")
