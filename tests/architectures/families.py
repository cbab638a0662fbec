"""Which classes are tried: those that transformers registers for a task, and those with states instead of attention."""

from transformers.models.auto import modeling_auto

REGISTERED = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq-to-seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "vision-language": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
"""Name of a family -> the table of transformers that registers its classes."""
STATE_SPACE = (
    "BailingHybridForCausalLM", "BambaForCausalLM", "FalconH1ForCausalLM", "FalconMambaForCausalLM",
    "GraniteMoeHybridForCausalLM", "JambaForCausalLM", "KimiLinearForCausalLM", "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM", "Lfm3ForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "MiniMaxForCausalLM",
    "NemotronHForCausalLM", "OlmoHybridForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM", "Qwen4ExpForCausalLM", "RecurrentGemmaForCausalLM", "RwkvForCausalLM",
    "Zamba2ForCausalLM", "ZambaForCausalLM", "xLSTMForCausalLM",
)  # fmt: skip
"""Classes, of all versions, whose layers keep a state: selective scans, gated deltas, recurrences, short convolutions."""
FAMILIES = (*REGISTERED, "state-space")


def classes_of(family):
    """Return the names of a family's classes in this version of transformers, sorted, each once."""
    registered = {name: set(getattr(modeling_auto, table).values()) for name, table in REGISTERED.items()}
    if family in registered:
        return sorted(registered[family])
    return sorted(set(STATE_SPACE) & set().union(*registered.values()))
