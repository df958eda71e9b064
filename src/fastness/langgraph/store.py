"""The store of LangGraph over a plane: items with a key in a namespace, for memory across threads."""

from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from langgraph.store.base import (
    BaseStore,
    GetOp,
    IndexConfig,
    InvalidNamespaceError,
    Item,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
    validate_op_namespace,
)

from fastness import AsyncPlane, DeleteRow, Plane, PutRow, Row, Tier
from fastness.errors import Conflict, InvalidArgument
from fastness.langgraph.item_rows import (
    SEPARATOR,
    Namespace,
    StoredItem,
    decode_item,
    decode_value,
    decode_vectors,
    encode_item,
    encode_value,
    encode_vectors,
    matches,
    namespace_of,
    partition_of,
    time_of,
)
from fastness.langgraph.vectors import VectorIndex, similarities
from fastness.limits import (
    COLLECTION_CHANGES_MAX,
    COLLECTION_ROWS_MAX,
    LANGGRAPH_COPY_BYTES,
    LANGGRAPH_INLINE_BYTES_MAX,
    LANGGRAPH_ROW_BYTES_MAX,
    LANGGRAPH_VECTORS_MAX,
)
from fastness.plane_access import Change, Key, access_to


class FastnessStore(BaseStore):
    """Items in namespaces, stored in a plane.

    A search returns items in the order of their namespaces and keys, or by similarity if there is a query and an index.
    The writes of a batch are one commit, of up to 256 items; its reads see what was stored before.

    Args:
        plane: where items are stored; it stays open.
        collection: the collection of the plane that has them.
        index: makes texts of items searchable by similarity, with the embedder that it names.
        ttl: when items expire; by default they do not, unless `put` says so.
    """

    supports_ttl = True

    def __init__(
        self,
        plane: Plane | AsyncPlane,
        *,
        collection: str = "langgraph-store",
        index: IndexConfig | None = None,
        ttl: TTLConfig | None = None,
    ) -> None:
        self._access = access_to(plane, collection)
        self._index = None if index is None else VectorIndex(index)
        self.ttl_config = ttl

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Execute operations, and return their results in order."""
        return self._access.run(self._batch(list(ops)))

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """As `batch`."""
        return await self._access.run_async(self._batch(list(ops)))

    # What follows is the same for threads and for event loops.

    async def _batch(self, ops: Sequence[Op]) -> list[Result]:
        results: list[Result] = []
        puts: dict[tuple[Namespace, str], PutOp] = {}
        for op in ops:
            validate_op_namespace(op)
        for op in ops:
            result: Result = None
            if isinstance(op, GetOp):
                result = await self._get(op)
            elif isinstance(op, SearchOp):
                result = await self._search(op)
            elif isinstance(op, ListNamespacesOp):
                result = await self._list_namespaces(op)
            elif isinstance(op, PutOp):
                if op.namespace:
                    puts[op.namespace, op.key] = op
                elif op.value is not None:
                    raise InvalidNamespaceError("An item needs a namespace of at least one label")
            else:
                raise InvalidArgument(f"Unknown operation: {type(op).__name__}")
            results.append(result)
        if puts:
            await self._put(list(puts.values()))
        return results

    async def _get(self, op: GetOp) -> Item | None:
        if not op.namespace:
            return None
        partition = partition_of(op.namespace)
        (row,) = await self._access.get_many(partition, [(op.key,)])
        if row is None:
            return None
        stored = decode_item(row.value)
        if op.refresh_ttl:
            await self._refresh([(partition, row, stored)])
        return Item(
            value=await self._value(stored),
            key=op.key,
            namespace=op.namespace,
            created_at=time_of(stored.created_ms),
            updated_at=time_of(stored.updated_ms),
        )

    async def _search(self, op: SearchOp) -> list[SearchItem]:
        if op.limit < 0 or op.offset < 0:
            raise InvalidArgument(f"limit is {op.limit} and offset is {op.offset}; both must be at least 0")
        if op.query and self._index is not None:
            found = await self._similar(op, op.query, self._index)
        else:
            found = []
            skipped = 0
            async for candidate in self._candidates(op):
                if len(found) == op.limit:
                    break
                if skipped < op.offset:
                    skipped += 1
                else:
                    found.append((candidate, None))
        if op.refresh_ttl:
            await self._refresh([(partition, row, stored) for (partition, row, stored, _), _ in found])
        return [
            SearchItem(
                namespace=namespace_of(partition),
                key=str(row.key[0]),
                value=value,
                created_at=time_of(stored.created_ms),
                updated_at=time_of(stored.updated_ms),
                score=score,
            )
            for (partition, row, stored, value), score in found
        ]

    async def _candidates(self, op: SearchOp) -> AsyncIterator["_Candidate"]:
        """The items below a namespace that match the filter, in order."""
        async for partition in self._partitions(op.namespace_prefix):
            async for page in self._access.pages(partition):
                for row in page:
                    stored = decode_item(row.value)
                    value = await self._value(stored)
                    if all(matches(value.get(name), wanted) for name, wanted in (op.filter or {}).items()):
                        yield partition, row, stored, value

    async def _similar(self, op: SearchOp, query: str, index: VectorIndex) -> list[tuple["_Candidate", float | None]]:
        """The items that are most similar to a query, with the score of their best texts; then those without texts."""
        with_texts: list[_Candidate] = []
        without_texts: list[tuple[_Candidate, float | None]] = []
        vectors: list[tuple[float, ...]] = []
        numbers: list[int] = []
        async for candidate in self._candidates(op):
            own = await self._vectors(candidate[2])
            if not own:
                without_texts.append((candidate, None))
                continue
            numbers += [len(with_texts)] * len(own)
            with_texts.append(candidate)
            vectors += own
            if len(vectors) > LANGGRAPH_VECTORS_MAX:
                raise InvalidArgument(
                    f"More than {LANGGRAPH_VECTORS_MAX} texts are below {op.namespace_prefix!r}, and each is compared "
                    "with the query; search a longer namespace, or give a filter"
                )
        best: dict[int, float] = {}
        if vectors:
            asked = await self._embed_query(query, index)
            for number, score in zip(numbers, similarities(asked, vectors), strict=True):
                best[number] = max(score, best.get(number, score))
        ranked = sorted(best, key=lambda number: -best[number])
        found: list[tuple[_Candidate, float | None]] = [(with_texts[number], best[number]) for number in ranked]
        return (found + without_texts)[op.offset : op.offset + op.limit]

    async def _put(self, ops: Sequence[PutOp]) -> None:
        vectors = await self._embed([op for op in ops if op.value is not None])
        now_ms = int(datetime.now(UTC).timestamp() * 1_000)
        created = await self._created([op for op in ops if op.value is not None])
        changes: list[Change] = []
        size = 0
        for op in ops:
            partition = partition_of(op.namespace)
            change: Change = DeleteRow(partition, (op.key,))
            if op.value is not None:
                ttl = None if op.ttl is None else op.ttl * 60
                body = await self._stored(encode_value(op.value))
                index = await self._stored(encode_vectors(vectors.get((op.namespace, op.key), [])))
                stored = StoredItem(created.get((op.namespace, op.key), now_ms), now_ms, ttl, *body, *index)
                change = PutRow(partition, (op.key,), encode_item(stored), ttl_seconds=ttl)
                size += len(change.value)
            if changes and (len(changes) == COLLECTION_CHANGES_MAX or size > LANGGRAPH_COPY_BYTES):
                await self._access.commit(changes)
                changes, size = [], 0
            changes.append(change)
        await self._access.commit(changes)

    async def _created(self, ops: Sequence[PutOp]) -> dict[tuple[Namespace, str], int]:
        """When the items that are replaced were created."""
        keys: dict[Namespace, list[Key]] = {}
        for op in ops:
            keys.setdefault(op.namespace, []).append((op.key,))
        created = {}
        for namespace, asked in keys.items():
            for start in range(0, len(asked), COLLECTION_ROWS_MAX):
                part = asked[start : start + COLLECTION_ROWS_MAX]
                for row in await self._access.get_many(partition_of(namespace), part):
                    if row is not None:
                        created[namespace, str(row.key[0])] = decode_item(row.value).created_ms
        return created

    async def _embed(self, ops: Sequence[PutOp]) -> dict[tuple[Namespace, str], list[list[float]]]:
        """The vectors of items."""
        index = self._index
        if index is None:
            return {}
        texts = {(op.namespace, op.key): index.texts(op.value or {}, op.index) for op in ops if op.index is not False}
        every = list(dict.fromkeys(text for found in texts.values() for text in found))
        if not every:
            return {}
        if self._access.can_wait:
            embedded = await index.embeddings.aembed_documents(every)
        else:
            embedded = index.embeddings.embed_documents(every)
        by_text = dict(zip(every, embedded, strict=True))
        return {place: [by_text[text] for text in found] for place, found in texts.items()}

    async def _embed_query(self, query: str, index: VectorIndex) -> list[float]:
        if self._access.can_wait:
            return await index.embeddings.aembed_query(query)
        return index.embeddings.embed_query(query)

    async def _refresh(self, found: Sequence[tuple[str, Row, StoredItem]]) -> None:
        """Begin the TTL of items again. One that has been changed meanwhile has done so by itself."""
        for partition, row, stored in found:
            if stored.ttl_seconds is not None:
                change = PutRow(partition, row.key, row.value, if_version=row.version, ttl_seconds=stored.ttl_seconds)
                try:
                    await self._access.commit([change], tier=Tier.IMPORTANT)
                except Conflict:
                    continue

    async def _list_namespaces(self, op: ListNamespacesOp) -> list[Namespace]:
        conditions = op.match_conditions or ()
        found: list[Namespace] = []
        async for partition in self._partitions(_literal_prefix(conditions)):
            namespace = namespace_of(partition)
            if all(_is_match(condition, namespace) for condition in conditions):
                shown = namespace if op.max_depth is None else namespace[: op.max_depth]
                if not found or found[-1] != shown:
                    found.append(shown)
                    if len(found) > op.offset + op.limit:
                        break
        return found[op.offset : op.offset + op.limit]

    async def _partitions(self, prefix: Namespace) -> AsyncIterator[str]:
        """The partitions of a namespace and of those below it, in order."""
        below = ""
        if prefix:
            own = partition_of(prefix)
            page = await self._access.scan(own, limit=1)
            if page.rows:
                yield own
            below = own + SEPARATOR
        async for partition in self._access.all_partitions(below):
            yield partition

    async def _value(self, stored: StoredItem) -> dict[str, Any]:
        return decode_value(await self._access.get_value(stored.data, stored.blob))

    async def _vectors(self, stored: StoredItem) -> list[tuple[float, ...]]:
        return decode_vectors(await self._access.get_value(stored.vectors, stored.vectors_blob))

    async def _stored(self, data: bytes) -> tuple[bytes, str]:
        return await self._access.put_value(
            data, inline_max=LANGGRAPH_INLINE_BYTES_MAX, row_max=LANGGRAPH_ROW_BYTES_MAX
        )


_Candidate = tuple[str, Row, StoredItem, dict[str, Any]]  # The partition, the row, what it has, and the value.


def _literal_prefix(conditions: Sequence[MatchCondition]) -> Namespace:
    """The labels that every namespace that matches begins with."""
    longest: Namespace = ()
    for condition in conditions:
        if condition.match_type == "prefix":
            path = tuple(condition.path)
            literal = path[: path.index("*")] if "*" in path else path
            longest = max(longest, literal, key=len)
    return longest


def _is_match(condition: MatchCondition, namespace: Namespace) -> bool:
    path = tuple(condition.path)
    if len(namespace) < len(path):
        return False
    compared = namespace[: len(path)] if condition.match_type == "prefix" else namespace[len(namespace) - len(path) :]
    return all(wanted in ("*", label) for wanted, label in zip(path, compared, strict=True))
