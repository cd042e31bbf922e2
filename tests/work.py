"""How much a call does, counted rather than timed: the same on a busy machine and a quiet one."""

import sys
from collections.abc import Callable
from types import FrameType


def instructions(call: Callable[[], object]) -> int:
    """How many bytecode instructions of Python a call executes.

    A loop over a list shows, a search inside a C function (`in` on a list of strings) does not.

    >>> instructions(lambda: [n for n in range(1000)]) > instructions(lambda: 1) + 1000
    True
    """
    number = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal number
        frame.f_trace_opcodes = True
        number += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        call()
    finally:
        sys.settrace(before)
    return number
