"""SmolLM 3."""

from pathlib import Path

from transformers import SmolLM3Config

from tests.families.equality import PREFIX_TOKENS, check_family
from tests.models.checkpoints import SMALL


def test_smollm3(tmp_path: Path) -> None:
    """The second and the fourth of five layers have no positions, but a window."""
    config = SmolLM3Config(
        **SMALL | {"num_hidden_layers": 5},
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=PREFIX_TOKENS // 2,
        attention_bias=True,
        mlp_bias=True,
    )
    check_family(config, tmp_path)
