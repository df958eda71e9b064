"""Media types: those of request bodies, and content negotiation for responses."""

from collections.abc import Sequence

from starlette.datastructures import Headers

from fastness.server.problems import MSGPACK, HttpError


def media_type_of(headers: Headers) -> str:
    """The media type of a request's body without its parameters; empty if there is none."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def is_json(media: str) -> bool:
    """Whether a media type is a kind of JSON."""
    return media == "application/json" or (media.startswith("application/") and media.endswith("+json"))


def negotiated_media_type(headers: Headers, offered: Sequence[str]) -> str:
    """The offered media type that the caller prefers; the first one if it states no preference.

    Raises:
        HttpError: the caller accepts none of the offered types.
    """
    ranges = _accepted_ranges(",".join(headers.getlist("accept")))
    if not ranges or not offered:
        return offered[0] if offered else ""
    best, best_weight = "", 0.0
    for media in offered:
        weight = _weight(media, ranges)
        if weight > best_weight:
            best, best_weight = media, weight
    if not best:
        raise HttpError(406, "not_acceptable", f"This endpoint produces {', '.join(offered)}; accept one of them")
    return best


def sends_msgpack(headers: Headers) -> bool:
    """Whether the request body is MessagePack."""
    return media_type_of(headers) in (MSGPACK, "application/x-msgpack")


def _accepted_ranges(header: str) -> list[tuple[str, float]]:
    ranges = []
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
            ranges.append((media, weight))
    return ranges


def _weight(media: str, ranges: Sequence[tuple[str, float]]) -> float:
    """The weight of a media type, by the most specific range that matches it."""
    family = f"{media.partition('/')[0]}/*"
    for pattern in (media, family, "*/*"):
        for accepted, weight in ranges:
            if accepted == pattern:
                return weight
    return 0.0
