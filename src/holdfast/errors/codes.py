"""From an error's code back to its class: for answers that carry errors of single items, and for the network."""

from holdfast.errors.families import HoldfastError


def rebuild(code: str, message: str) -> HoldfastError:
    """The error that `code` names, saying `message`; the root of all errors if this version does not know it."""
    error = HoldfastError.__new__(_classes().get(code, HoldfastError), message)
    Exception.__init__(error, message)
    return error


def _classes() -> dict[str, type[HoldfastError]]:
    found: dict[str, type[HoldfastError]] = {}
    families = [HoldfastError]
    while families:
        family = families.pop()
        found[family.code] = family
        families += family.__subclasses__()
    return found
