"""The size of a record of fp8 numbers (records.py). Needs no torch."""

SCALE_BYTES = 16  # the scale with its padding
ALIGNMENT = 16


def record_bytes(num_values: int) -> int:
    """The size of a record: `record_bytes(16 * 64) == 1040`."""
    return -(-num_values // ALIGNMENT) * ALIGNMENT + SCALE_BYTES
