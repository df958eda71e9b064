"""Media types: what a body is, and what a caller wants to hear."""

from collections.abc import Sequence

from starlette.datastructures import Headers

from holdfast.server.http.problems import MSGPACK, Refusal


def media_type_of(asked: Headers) -> str:
    """The media type of a request's body, without its parameters; empty if it does not say."""
    return asked.get("content-type", "").partition(";")[0].strip().lower()


def is_json(media: str) -> bool:
    """Whether a media type is a kind of JSON."""
    return media == "application/json" or (media.startswith("application/") and media.endswith("+json"))


def chosen(asked: Headers, offered: Sequence[str]) -> str:
    """What the caller would rather have of what there is; the first of it if it does not say.

    Raises:
        Refusal: it wants nothing of what there is.
    """
    wishes = _wishes(",".join(asked.getlist("accept")))
    if not wishes or not offered:
        return offered[0] if offered else ""
    best, best_weight = "", 0.0
    for media in offered:
        weight = _weight(media, wishes)
        if weight > best_weight:
            best, best_weight = media, weight
    if not best:
        raise Refusal(406, "not_acceptable", f"This is answered with {', '.join(offered)}; accept one of them")
    return best


def speaks_msgpack(asked: Headers) -> bool:
    """Whether a caller sends MessagePack."""
    return media_type_of(asked) in (MSGPACK, "application/x-msgpack")


def _wishes(header: str) -> list[tuple[str, float]]:
    wishes = []
    for part in header.split(","):
        media, *parameters = (piece.strip().lower() for piece in part.split(";"))
        weight = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    weight = float(parameter[2:])
                except ValueError:
                    weight = 0.0
        if media:
            wishes.append((media, weight))
    return wishes


def _weight(media: str, wishes: Sequence[tuple[str, float]]) -> float:
    """The weight that the most exact of the wishes gives to a media type."""
    family = f"{media.partition('/')[0]}/*"
    for pattern in (media, family, "*/*"):
        for wish, weight in wishes:
            if wish == pattern:
                return weight
    return 0.0
