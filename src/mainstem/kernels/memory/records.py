"""K or V of one KV head in a page as a record of fp8 numbers with one scale.

    record   page_size * dim numbers, e4m3 | padding | scale, fp32 | 12 bytes

A number is its code times the scale. The scale is exact: the largest number of the page gets the
largest code, 448. Records begin and end at multiples of 16 bytes.
"""

import torch
from torch import Tensor

from mainstem.kernels.memory.record_size import SCALE_BYTES, record_bytes

MOST = 448.0  # of e4m3


def round_pages(values: Tensor, scale: float | None = None) -> Tensor:
    """Return the records [..., record_bytes] of pages [..., values]. With a `scale`, larger numbers
    than 448 times the scale become that number."""
    wide = values.float()
    if scale is None:
        scales = wide.abs().amax(-1, keepdim=True) / MOST
    else:
        scales = torch.full((*wide.shape[:-1], 1), scale)
    codes = torch.where(scales > 0, wide / scales, 0.0).clamp_(-MOST, MOST)
    num_values = wide.shape[-1]
    size = record_bytes(num_values)
    records = torch.zeros((*wide.shape[:-1], size), dtype=torch.uint8)
    records[..., :num_values] = codes.to(torch.float8_e4m3fn).view(torch.uint8)
    first = size - SCALE_BYTES
    records[..., first : first + 4] = scales.contiguous().view(torch.uint8)
    return records


def expand_pages(records: Tensor, out: Tensor) -> None:
    """Write the numbers of contiguous records [..., record_bytes] to `out` [..., values]."""
    num_values = out.shape[-1]
    scales = records.view(torch.float32)[..., -SCALE_BYTES // 4, None]
    # The bits of e4m3, shifted, are those of a half that is 256 times smaller. This takes a quarter
    # of the time of torch's conversion.
    halves = records[..., :num_values].view(torch.int8).to(torch.int16)
    halves.bitwise_left_shift_(7).bitwise_and_(~0x4000)
    if out.dtype == torch.float32:
        out.copy_(halves.view(torch.float16)).mul_(scales * 256)
    else:
        out.copy_(halves.view(torch.float16).float().mul_(scales * 256))
