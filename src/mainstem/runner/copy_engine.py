"""Copies rows between pinned host memory and a GPU with the GPU's copy engines.

torch copies only contiguous tensors. All layers of a page, or a few layers of many slots, are
strided rows; the driver copies them in one call, and uses no multiprocessor.
"""

import ctypes
from functools import cache

from mainstem.core.errors import ConfigError

HOST, DEVICE = 1, 2  # CU_MEMORYTYPE_
MAX_PITCH = 2**31 - 1  # the most bytes from row to row that every card allows


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


class PitchedRows:
    """Rows of `width` bytes, which begin every `host_pitch` or `device_pitch` bytes."""

    def __init__(self, width: int, host_pitch: int, device_pitch: int) -> None:
        self._driver = _driver()
        self._to_device = _Copy2D(
            src_type=HOST, src_pitch=host_pitch, dst_type=DEVICE, dst_pitch=device_pitch,
            width=width,
        )  # fmt: skip
        self._to_host = _Copy2D(
            src_type=DEVICE, src_pitch=device_pitch, dst_type=HOST, dst_pitch=host_pitch,
            width=width,
        )  # fmt: skip

    def to_device(self, host: int, device: int, rows: int, stream: int) -> None:
        """Copy to the device; `host` and `device` are the addresses of the first row."""
        copy = self._to_device
        copy.src_host, copy.dst_device, copy.height = host, device, rows
        self._run(copy, stream)

    def to_host(self, device: int, host: int, rows: int, stream: int) -> None:
        copy = self._to_host
        copy.src_device, copy.dst_host, copy.height = device, host, rows
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
