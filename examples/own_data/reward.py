"""A reward of our own: one sentence, with the word that was asked for, and not too long."""


def reward(prompt: str, response: str, word: str, max_words: int, **row: object) -> float:
    """Returns a number in [0, 1], so that near misses differ from far ones."""
    text = response.strip()
    words = text.split()
    has_word = word in text.lower()
    short = len(words) <= max_words
    one_sentence = text.endswith(".") and text.count(".") == 1
    return 0.6 * has_word + 0.2 * (has_word and short) + 0.2 * (has_word and one_sentence)
