"""Rows between pinned host memory and a GPU, by the card's copy engines.

torch copies contiguous tensors only; a few layers of many slots are rows at a distance, which the
driver copies in one call, without taking a multiprocessor from those who compute.
"""

import ctypes
from functools import cache

from mainstem.core.errors import ConfigError

HOST, DEVICE = 1, 2  # CU_MEMORYTYPE_


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver."""

    _fields_ = (
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class Rows:
    """`width` bytes every `pitch` bytes of host memory, and one after the other on the device."""

    def __init__(self, pitch: int, width: int) -> None:
        self._driver = _driver()
        self._pitch = pitch
        self._width = width

    def to_device(self, host: int, device: int, rows: int, stream: int) -> None:
        """Addresses of the first row on either side."""
        copy = _Copy2D(
            src_type=HOST, src_host=host, src_pitch=self._pitch,
            dst_type=DEVICE, dst_device=device, dst_pitch=self._width,
            width=self._width, height=rows,
        )  # fmt: skip
        self._run(copy, stream)

    def to_host(self, device: int, host: int, rows: int, stream: int) -> None:
        copy = _Copy2D(
            src_type=DEVICE, src_device=device, src_pitch=self._width,
            dst_type=HOST, dst_host=host, dst_pitch=self._pitch,
            width=self._width, height=rows,
        )  # fmt: skip
        self._run(copy, stream)

    def _run(self, copy: _Copy2D, stream: int) -> None:
        failed = self._driver.cuMemcpy2DAsync_v2(ctypes.byref(copy), ctypes.c_void_p(stream))
        if failed:
            raise RuntimeError(f"cuMemcpy2DAsync: CUDA error {failed}")


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(f"a host tier needs NVIDIA's driver library: {error}") from error
