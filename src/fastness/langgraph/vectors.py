"""Vectors of items: which texts are embedded, and how similar vectors are."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from langgraph.store.base import Embeddings, IndexConfig, ensure_embeddings, get_text_at_path, tokenize_path

try:
    import numpy
except ImportError:  # It is no dependency of LangGraph, and makes comparing faster by a factor of a hundred.
    numpy = None  # type: ignore[assignment]


class VectorIndex:
    """What an `IndexConfig` of LangGraph says."""

    def __init__(self, config: IndexConfig) -> None:
        self.embeddings: Embeddings = ensure_embeddings(config["embed"])
        self._paths = _tokenized(config.get("fields") or ["$"])

    def texts(self, value: Mapping[str, Any], fields: Sequence[str] | None) -> list[str]:
        """The texts of an item that are embedded; `fields` replaces those of the index."""
        paths = self._paths if fields is None else _tokenized(fields)
        return [text for path in paths for text in get_text_at_path(value, path)]


def _tokenized(fields: Sequence[str]) -> list[Any]:
    return [field if field == "$" else tokenize_path(field) for field in fields]


def similarities(query: Sequence[float], vectors: Sequence[Sequence[float]]) -> list[float]:
    """The cosine of the angle between `query` and each vector; 0 for a vector of zeros."""
    if numpy is None:
        return [_cosine(query, vector) for vector in vectors]
    rows, one = numpy.asarray(vectors, dtype=float), numpy.asarray(query, dtype=float)
    lengths = numpy.linalg.norm(rows, axis=1) * numpy.linalg.norm(one)
    lengths[lengths == 0] = numpy.inf
    found: list[float] = (rows @ one / lengths).tolist()
    return found


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    length = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / length if length else 0.0
