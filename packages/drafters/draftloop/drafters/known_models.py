"""The `config.json` of models that our configs and GPU measurements are made for, so that neither needs a checkpoint.

Only what decides shapes; keyed by the name a checkpoint folder usually has.
"""

from __future__ import annotations

from typing import Any

KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B-Instruct": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
    "Qwen3-8B": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    },
}  # fmt: skip
