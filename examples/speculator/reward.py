"""The share of the words that were asked for which the answer holds."""

import re


def reward(prompt: str, response: str, **row: object) -> float:
    """Returns a number in [0, 1]; `prompt` lists the words: "river, bread, winter"."""
    words = prompt.split(", ")
    return sum(bool(re.search(rf"\b{word}\b", response, re.I)) for word in words) / len(words)
