"""Plain-text tables and numbers for people."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table. Columns are as wide as their widest cell; columns of numbers are flush
    right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    is_number = [
        bool(rows) and all(cell[:1].isdigit() or cell in ("", "-") for cell in column[1:])
        for column in columns
    ]

    def line(cells: Sequence[str]) -> str:
        placed = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, is_number, strict=True)
        ]
        return "  ".join(placed).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
