"""The rewards of the experiment: a correct answer, with and without a pressure to be short."""

MOST_TOKENS = 24
WEIGHT_OF_LENGTH = 0.5


def correct(prompt: str, response: str, *, answer: str, **row: object) -> float:
    """Returns 1 if the response ends with "# d<answer>", else 0."""
    return float(response.split()[-2:] == ["#", f"d{answer}"])


def short(
    prompt: str, response: str, *, answer: str, response_token_ids: list[int], **row: object
) -> float:
    """Returns what correct() does, less half of the length as a share of the longest response."""
    length = len(response_token_ids) / MOST_TOKENS
    return correct(prompt, response, answer=answer) - WEIGHT_OF_LENGTH * length
