"""Words for people: counts of things, and large and small numbers."""

PREFIXES = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: "", 1e-3: "m", 1e-6: "\u00b5", 1e-9: "n"}


def counted(number: int, noun: str) -> str:
    """`1 request`, `2,000 requests`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def last_line(error: BaseException) -> str:
    """The last line of an error's text; its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def with_prefix(value: float) -> str:
    """Three digits with a decimal prefix: `3.35 T`, `7 \u00b5`."""
    for scale, prefix in PREFIXES.items():
        if abs(value) >= 0.9995 * scale:
            return f"{value / scale:.3g} {prefix}".rstrip()
    return f"{value:.3g}"
