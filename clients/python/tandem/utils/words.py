"""Numbers and times in words, for people."""


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Returns "1 token", "2,048 tokens"; `plural` is the noun's with an s by default."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def duration(seconds: float) -> str:
    """Returns a time by its two largest units: "12s", "3m05s", "2h07m", "1d03h"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
