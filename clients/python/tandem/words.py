"""Numbers with their nouns, for people."""


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Returns "1 token", "2,048 tokens"; `plural` is the noun's with an s by default."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
