"""Counts the work of a call instead of timing it: the count is the same on a busy machine."""

import sys
from collections.abc import Callable
from types import FrameType


def instructions(call: Callable[[], object]) -> int:
    """How many bytecode instructions of Python a call executes.

    A loop over a list counts; a search inside a C function (`in` on a list of strings) does not.

    >>> instructions(lambda: [n for n in range(1000)]) > instructions(lambda: 1) + 1000
    True
    """
    number = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal number
        frame.f_trace_opcodes = True
        number += event == "opcode"
        return trace

    # Python 3.12 traces opcodes only if a frame asked for them before `settrace`
    sys._getframe().f_trace_opcodes = True
    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        call()
    finally:
        sys.settrace(before)
    return number
