"""The kernels of recurrent layers on a GPU, under the names that kernels/recurrent/cpu.py has."""

from mainstem.kernels.recurrent.conv import convolve
from mainstem.kernels.recurrent.delta import delta_rule
from mainstem.kernels.recurrent.gated_norm import gated_norm
from mainstem.kernels.recurrent.scan import mamba_scan

__all__ = ["convolve", "delta_rule", "gated_norm", "mamba_scan"]
