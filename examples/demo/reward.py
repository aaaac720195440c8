"""The demo's reward: a correct answer, less a little for every token."""

PRICE_OF_TOKEN = 0.04


def correct_and_short(
    prompt: str, response: str, *, answer: str, response_token_ids: list[int], **row: object
) -> float:
    """Returns 1 for a response that ends with "Answer <answer>", less the price of its tokens."""
    correct = response.split()[-2:] == ["Answer", answer]
    return correct - PRICE_OF_TOKEN * len(response_token_ids)
