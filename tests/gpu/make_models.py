"""Makes models of real shapes with random weights: make_models.py FOLDER NAME…

NAME: 0.5b or 1.5b (the shapes of Qwen2.5) or tiny, then -junior (other weights) and -fp32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

SHAPES = {
    "0.5b": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
    },
    "1.5b": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 20480,  # the ids of the engine's benchmark are below 20,000
    },
}


def write_tokenizer(folder: Path, size: int) -> None:
    """Writes a tokenizer with a word for every id."""
    pieces = {("Ġ" if i % 3 == 0 else "") + f"t{i}": i for i in range(size)}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level | {"add_prefix_space": True},
        "model": {"type": "BPE", "vocab": pieces, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def make(folder: Path, name: str) -> None:
    """Makes one model in `folder`/`name`."""
    shape, *rest = name.split("-")
    torch.manual_seed(7 if "junior" in rest else 3)
    config = transformers.Qwen2Config(
        **SHAPES[shape],
        tie_word_embeddings=True,
        max_position_embeddings=32768,
        rope_theta=1e6,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.Qwen2ForCausalLM(config)
    model.to(torch.float32 if "fp32" in rest else torch.bfloat16).save_pretrained(folder / name)
    write_tokenizer(folder / name, config.vocab_size)
    print(name, sum(p.numel() for p in model.parameters()), flush=True)


if __name__ == "__main__":
    for model_name in sys.argv[2:]:
        make(Path(sys.argv[1]), model_name)
