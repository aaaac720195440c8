"""The bytes and operations of a decoder of the check's shapes, for shares of a peak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def matrices(config: Mapping[str, Any]) -> int:
    """Returns how many parameters of a Qwen2 model a token is multiplied by, the head's too."""
    hidden, of_head = config["hidden_size"], _head_dim(config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layer = 2 * hidden * (heads + kv_heads) * of_head + 3 * hidden * config["intermediate_size"]
    return config["num_hidden_layers"] * layer + config["vocab_size"] * hidden


def parameters(config: Mapping[str, Any]) -> int:
    """Returns the number of parameters of a Qwen2 model with tied embeddings."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    vectors = config["num_hidden_layers"] * (2 * hidden + heads * _head_dim(config)) + hidden
    return matrices(config) + vectors


def _scores(config: Mapping[str, Any], keys: float) -> float:
    """Returns the operations of attention of one token to `keys` keys: scores and their sums."""
    heads = config["num_attention_heads"]
    return config["num_hidden_layers"] * heads * _head_dim(config) * 4 * keys


def decode_bytes(config: Mapping[str, Any], number: int, sequences: int, keys: float) -> float:
    """Returns what a decode step must read: the weights once, and each sequence's keys and values.

    Args:
        number: bytes of a weight and of a number of the cache.
        keys: mean number of keys of a sequence.
    """
    token = config["num_hidden_layers"] * config["num_key_value_heads"] * _head_dim(config) * 2
    return number * (parameters(config) + sequences * keys * token)


def prefill_operations(config: Mapping[str, Any], sequences: int, tokens: int) -> float:
    """Returns the operations of prompts, with one token of each at the head: its last one."""
    head = config["vocab_size"] * config["hidden_size"]
    layers = 2 * (matrices(config) - head) + _scores(config, tokens / 2)
    return sequences * (tokens * layers + 2 * head)


def training_operations(config: Mapping[str, Any], sequences: int, tokens: int) -> float:
    """Returns the operations of a forward and a backward pass, without recomputation."""
    of_token = 2 * matrices(config) + _scores(config, tokens / 2)
    return 3 * sequences * tokens * of_token
