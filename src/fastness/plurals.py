"""Numbers of things, in words."""


def counted(number: int, one: str, many: str = "") -> str:
    """1 message, 2,000 messages; `many` is the plural where it is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
