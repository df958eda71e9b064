"""How to install the packages of an extra, for messages about one that is missing. `docs/install.md` says more."""


def how_to_install(extra: str) -> str:
    """What to run: `run: pip install '.[mcp]' in a clone of Fastness`."""
    return f"run: pip install '.[{extra}]' in a clone of Fastness"
