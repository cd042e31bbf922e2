"""The state of the engine at one moment, for people and dashboards."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StemView:
    """A run of tokens that exactly `num_sequences` running sequences hold."""

    stem_id: int
    parent_id: int | None  # None: the run begins at the first token
    num_tokens: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class PromptView:
    """A prompt that takes more than one step, and its progress after the running step."""

    request_id: str
    num_computed: int  # tokens, cached ones included


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What runs, what waits, and what is shared at one moment."""

    num_running: int
    num_waiting: int
    num_pages: int
    page_size: int
    num_held_pages: int  # by running sequences
    num_cached_pages: int  # pages that can be found by key, whether a sequence holds them or not
    stems: tuple[StemView, ...]  # shared by two sequences or more, parents first
    num_host_pages: int = 0  # in host memory, including those that are also on the device
    num_disk_pages: int = 0
    stored_page_bytes: int = 0  # size of one page in host memory or on disk
    num_copies: int = 0  # loads and saves in progress
    prompts: tuple[PromptView, ...] = ()
    num_unsaved_pages: int = 0  # to be written to the disk, or being written
    num_states: int = 0  # slots for states of recurrent layers
    num_held_states: int = 0  # slots of running sequences, with their states or rows
    num_kept_states: int = 0  # states that later requests can start from
    num_window_parts: int = 0  # windowed parts of pages; 0: they have no pool of their own
    num_held_window_parts: int = 0  # those that running sequences and copies need
