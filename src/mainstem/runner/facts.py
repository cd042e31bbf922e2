"""The facts about a loaded model that the control plane needs."""

from dataclasses import dataclass, replace

from mainstem.core.config import DType


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """Plain numbers; no tensor, no device."""

    num_pages: int
    page_size: int
    vocab_size: int
    max_model_len: int
    identity: bytes  # weights, dtype, quantization and page layout: part of every PageKey
    num_params: int  # weights of the layers that one token uses
    num_heads: int
    num_kv_heads: int  # of layers without a window, if there are any; so is head_dim
    head_dim: int
    dtype: DType  # the compute dtype
    # If layers with a window keep their K and V apart, in places of their own (Step.window_parts):
    window: int | None = None  # tokens that the largest window sees; None: pages have one part
    # places of windowed parts, without the last one that may hold anything. 0: each page has a
    # windowed part, at its own number
    num_parts: int = 0
    num_states: int = 0  # slots for states of recurrent layers; 0: the model has none
    pages_per_state: int = 0  # the memory of a state, in pages
    row_slots_per_state: int = 0  # row slots in the memory of a state (kv/rows.py); 0: no rows
    rows_per_slot: int = 0
    page_bytes: int = 0  # of a rank's part of a page
    part_bytes: int = 0  # of these, in the windowed part, if `num_parts`
    # sequences that run at once, if full pages are rounded: each has an open page. None: pages are
    # kept as they are computed, and can be shared in part
    num_open_pages: int | None = None
    open_page_bytes: int = 0
    num_idle_params: int = 0  # weights of experts that a token does not use
    pair_flops: int = 0  # of one query token with one key token, over all layers without a window
    bytes_per_param: float = 2.0  # mean over all these weights
    device_name: str = "cpu"
    max_step_tokens: int | None = None  # tokens that the buffers hold; None: no limit
    max_span_levels: int | None = None  # maximum shared spans of one sequence that fit the buffers
    span_align_tokens: int | None = None  # spans begin at multiples of this; None: at any page

    @property
    def budget(self) -> str:
        """How the memory for keys, values and states is divided, in words."""
        words = f"{self.num_pages:,} pages x {self.page_bytes - self.part_bytes:,} bytes"
        if self.num_parts:
            words += f", {self.num_parts:,} windowed parts of pages x {self.part_bytes:,} bytes"
        if self.num_open_pages is not None:
            words += f", {self.num_open_pages:,} open pages x {self.open_page_bytes:,} bytes"
        if not self.num_states:
            return words
        state_bytes = self.pages_per_state * self.page_bytes
        words = f"{words}, {self.num_states:,} states x {state_bytes:,} bytes"
        if self.row_slots_per_state:
            words += f", each with room for rows: {self.row_slots_per_state} x {self.rows_per_slot}"
        return words

    def with_states(
        self, num_states: int, pages_per_state: int, row_slots_per_state: int, rows_per_slot: int
    ) -> "RunnerFacts":
        """The same model with slots for states."""
        return replace(
            self,
            num_states=num_states,
            pages_per_state=pages_per_state,
            row_slots_per_state=row_slots_per_state,
            rows_per_slot=rows_per_slot,
        )

    def with_open_pages(self, num_open: int, page_bytes: int) -> "RunnerFacts":
        """The same model, whose full pages are rounded."""
        return replace(self, num_open_pages=num_open, open_page_bytes=page_bytes)

    def on_device(
        self, name: str, max_step_tokens: int, max_span_levels: int, span_align_tokens: int | None
    ) -> "RunnerFacts":
        """The same model on a device whose buffers hold steps of `max_step_tokens`."""
        return replace(
            self,
            device_name=name,
            max_step_tokens=max_step_tokens,
            max_span_levels=max_span_levels,
            span_align_tokens=span_align_tokens,
        )
