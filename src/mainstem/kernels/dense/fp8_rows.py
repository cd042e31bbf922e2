"""Rows in fp8: what the kernels that write them and the linears that read them agree on."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
MAX = 448.0  # the largest fp8 number, which a row's largest magnitude becomes
MIN_PEAK = 1e-12  # a row of zeros must not divide by zero

Fp8Rows = tuple[Tensor, Tensor]  # values [tokens, in], scales [tokens, 1] fp32
