"""Architectures that are known but not supported; an error says why."""

_MLA = "multi-head latent attention (MLA)"
_SPARSE = "sparse attention, which reads only some keys"
_ALIBI = "positions by ALiBi"
_LINEAR = "layers of linear attention without a delta rule"
_MAMBA1 = "layers of Mamba 1"
_ONLY_MAMBA = "Mamba layers only; models need some layers with attention"

REASONS = {
    "DeepseekV2ForCausalLM": _MLA,
    "DeepseekV3ForCausalLM": _MLA,
    "DeepseekVLV2ForCausalLM": _MLA,
    "Glm4MoeLiteForCausalLM": _MLA,
    "KimiK25ForConditionalGeneration": _MLA,
    "KimiLinearForCausalLM": _MLA,
    "LongcatFlashForCausalLM": _MLA,
    "MiniCPM3ForCausalLM": _MLA,
    "DeepseekV32ForCausalLM": _SPARSE,
    "DeepseekV4ForCausalLM": _SPARSE,
    "GlmMoeDsaForCausalLM": _SPARSE,
    "BloomForCausalLM": _ALIBI,
    "MPTForCausalLM": _ALIBI,
    "MptForCausalLM": _ALIBI,
    "MiniMaxM1ForCausalLM": _LINEAR,
    "MiniMaxText01ForCausalLM": _LINEAR,
    "OlmoHybridForCausalLM": "a delta rule with negative eigenvalues",
    "RecurrentGemmaForCausalLM": "layers of RG-LRU",
    "FalconMambaForCausalLM": _MAMBA1,
    "JambaForCausalLM": _MAMBA1,
    "MambaForCausalLM": _MAMBA1,
    "ZambaForCausalLM": _MAMBA1,
    "Mamba2ForCausalLM": _ONLY_MAMBA,
    "BambaForCausalLM": "Mamba-2 layers, but its config is not read yet",
    "Zamba2ForCausalLM": "layers with attention that share their weights",
    "PhiMoEForCausalLM": "a router that chooses experts one after the other (SparseMixer)",
    "PhimoeForCausalLM": "a router that chooses experts one after the other (SparseMixer)",
}
