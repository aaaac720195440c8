"""The reward: whether the last thing that was written is the answer."""


def correct(prompt: str, response: str, answer: int, **row: object) -> float:
    """Returns 1 if the response ends with "answer <the row's answer>", else 0."""
    return float(response.split()[-2:] == ["answer", str(answer)])
