"""Builds what a power loss may leave of recorded file operations.

The rules are those of POSIX:

- What was written to a file is durable after a sync of that file. Until then each write may have reached the disk or
  not, in any order, in part, or as a longer file with zeros in place of the data.
- A name is durable after a sync of its folder. Until then each creation, rename, link and removal may have reached the
  disk or not, in any order. A rename happens as a whole. A sync of a file does not make its name durable.
- A disk writes a sector of 512 bytes as a whole, with its content at one moment. So a write that reached the disk
  brings earlier writes to the same sector with it.
"""

import posixpath
import random
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from fastness.testing.storage.traces import Event, Kind

SECTOR_BYTES: Final = 512


class Loss(StrEnum):
    """How a power loss treats what is not synced."""

    NOTHING = "nothing"  # Everything reached the disk, as when only the process is killed.
    EVERYTHING = "everything"
    IN_ORDER = "in order"  # What happened before some moment reached the disk; the write at that moment is torn.
    ANYTHING = "anything"  # Each write and each name by itself.


class Fate(StrEnum):
    """What becomes of one write that is not synced."""

    KEPT = "kept"
    DROPPED = "dropped"
    TORN = "torn"  # Some of its sectors are kept.
    ZEROED = "zeroed"  # The file grew, and its new part is zeros.


class Image(msgspec.Struct, frozen=True):
    """What a power loss left."""

    seed: int
    cut: int  # How many events happened before the power loss.
    loss: Loss
    entries: dict[str, bytes | None]  # By relative path; None is a folder. Folders come before what they contain.
    marks: tuple[bytes, ...]  # The marks before the power loss.

    def __str__(self) -> str:
        return f"image of seed {self.seed}: power loss after event {self.cut}, losing {self.loss}"


class _File:
    __slots__ = ("synced", "unsynced")

    def __init__(self) -> None:
        self.synced = bytearray()
        self.unsynced: list[tuple[int, Event]] = []  # With their numbers in the trace.


class _Folder:
    __slots__ = ("synced", "unsynced")

    def __init__(self) -> None:
        self.synced: dict[str, _File | _Folder] = {}
        self.unsynced: list[_NameChange] = []


class _NameChange(msgspec.Struct, frozen=True, eq=False):
    """Names that a call set, or removed where the node is None; they reach the disk together."""

    number: int
    edits: tuple[tuple[_Folder, str, _File | _Folder | None], ...]


class Disk:
    """The files below a folder: what is durable, and what a power loss may still take."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._top = _Folder()
        self._nodes: dict[str, _File | _Folder] = {root: self._top}  # By path, as the running process sees them.
        self._inodes: dict[int, _File | _Folder] = {}  # An inode may be used again, by another file.
        self._files: list[_File] = []
        self._folders: list[_Folder] = [self._top]
        self._count = 0

    def apply(self, event: Event) -> None:
        """Take in the next event of the trace."""
        self._count += 1
        if event.kind is Kind.CREATE:
            self._add(event, _File())
        elif event.kind is Kind.MAKE_FOLDER:
            self._add(event, _Folder())
        elif event.kind in (Kind.WRITE, Kind.TRUNCATE):
            file = self._inodes[event.inode]
            assert isinstance(file, _File)
            file.unsynced.append((self._count, event))
        elif event.kind is Kind.SYNC:
            self._sync(self._top if event.path == self._root else self._inodes.get(event.inode))
        elif event.path not in self._nodes:
            return  # A mark, or a file whose creation the recorder does not see: one opened with stdio.
        elif event.kind is Kind.REMOVE:
            self._change((event.path, None))
            del self._nodes[event.path]
        else:
            self._name_again(event)

    def entries(self, *, keeps_name: Callable[[int], bool], fate_of: "FateOf") -> dict[str, bytes | None]:
        """What a power loss leaves now, by relative path; None is a folder.

        Each change of names whose number `keeps_name`, and each write that `fate_of` keeps, reached the disk.
        """
        names: dict[_Folder, dict[str, _File | _Folder]] = {}
        for change in self._unsynced_names():
            if keeps_name(change.number):
                for folder, name, node in change.edits:
                    _set(names.setdefault(folder, dict(folder.synced)), name, node)
        found: dict[str, bytes | None] = {}
        left: list[tuple[str, _Folder]] = [("", self._top)]
        contents: dict[_File, bytes] = {}  # A file that has several names has one content.
        while left:
            prefix, folder = left.pop()
            for name, node in sorted(names.get(folder, folder.synced).items()):
                if isinstance(node, _Folder):
                    found[prefix + name] = None
                    left.append((f"{prefix}{name}/", node))
                else:
                    if node not in contents:
                        contents[node] = _content(node, fate_of)
                    found[prefix + name] = contents[node]
        return found

    def unsynced_numbers(self) -> list[int]:
        """The numbers of all events that a power loss may still take."""
        writes = {number for file in self._files for number, _ in file.unsynced}
        return sorted(writes | {change.number for change in self._unsynced_names()})

    def _unsynced_names(self) -> list[_NameChange]:
        changes = {change for folder in self._folders for change in folder.unsynced}
        return sorted(changes, key=lambda change: change.number)

    def _add(self, event: Event, node: _File | _Folder) -> None:
        if isinstance(node, _File):
            self._files.append(node)
        else:
            self._folders.append(node)
        self._nodes[event.path] = self._inodes[event.inode] = node
        self._change((event.path, node))

    def _name_again(self, event: Event) -> None:
        node = self._nodes[event.path]
        if event.kind is Kind.LINK:
            self._nodes[event.target] = node
            self._change((event.target, node))
            return
        self._change((event.path, None), (event.target, node))
        for path in [path for path in self._nodes if path == event.path or path.startswith(event.path + "/")]:
            self._nodes[event.target + path.removeprefix(event.path)] = self._nodes.pop(path)

    def _change(self, *edits: tuple[str, _File | _Folder | None]) -> None:
        found: list[tuple[_Folder, str, _File | _Folder | None]] = []
        for path, node in edits:
            folder = self._nodes[posixpath.dirname(path)]
            assert isinstance(folder, _Folder)
            found.append((folder, posixpath.basename(path), node))
        change = _NameChange(self._count, tuple(found))
        for folder in {folder for folder, _, _ in found}:
            folder.unsynced.append(change)

    def _sync(self, node: _File | _Folder | None) -> None:
        if node is None:
            return
        if isinstance(node, _File):
            node.synced = bytearray(_content(node, lambda _number, _sectors: (Fate.KEPT, ())))
            node.unsynced = []
            return
        while node.unsynced:
            self._sync_change(node.unsynced[0])

    def _sync_change(self, change: _NameChange) -> None:
        """Make a change of names durable, after earlier ones of the same names: a rename may be of another folder."""
        for folder, name, _ in change.edits:
            for earlier in [each for each in folder.unsynced if each.number < change.number]:
                if any(edit[:2] == (folder, name) for edit in earlier.edits):
                    self._sync_change(earlier)
        for folder, name, node in change.edits:
            _set(folder.synced, name, node)
        for folder in {folder for folder, _, _ in change.edits}:
            folder.unsynced.remove(change)


# For the number of a write and its sectors: its fate, and the sectors that are kept if it is torn.
FateOf = Callable[[int, range], tuple[Fate, Iterable[int]]]


def _set(names: dict[str, _File | _Folder], name: str, node: _File | _Folder | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _content(file: _File, fate_of: FateOf) -> bytes:
    """A file's bytes on the disk. `cached` is what the running process sees, from which sectors reach the disk."""
    cached, disk = bytearray(file.synced), bytearray(file.synced)
    for number, event in file.unsynced:
        if event.kind is Kind.TRUNCATE:
            _resize(cached, event.offset)
            if fate_of(number, range(0))[0] is Fate.KEPT:
                _resize(disk, event.offset)
            continue
        end = event.offset + len(event.data)
        _grow(cached, end)
        cached[event.offset : end] = event.data
        sectors = range(event.offset // SECTOR_BYTES, -(-end // SECTOR_BYTES))
        fate, kept = fate_of(number, sectors)
        for sector in sectors if fate is Fate.KEPT else kept if fate is Fate.TORN else ():
            begin = sector * SECTOR_BYTES
            _grow(disk, begin)
            disk[begin : begin + SECTOR_BYTES] = cached[begin : begin + SECTOR_BYTES]
        if fate is Fate.ZEROED:
            _grow(disk, end)
    return bytes(disk)


def _grow(content: bytearray, size: int) -> None:
    content.extend(bytes(max(0, size - len(content))))


def _resize(content: bytearray, size: int) -> None:
    del content[size:]
    _grow(content, size)


def build_image(
    events: Sequence[Event], root: str, seed: int, *, first_cut: int = 0, loss: Loss | None = None
) -> Image:
    """The image of a seed: it decides at which event the power is lost, often before a sync, and what reached the disk.

    Args:
        events: a trace of operations below the folder `root`.
        first_cut: the power is lost after at least this many events.
        loss: what is lost; None: the seed decides, and something is.
    """
    chance = random.Random(seed)
    cut = _cut(events, chance, first_cut)
    chosen = chance.choice((Loss.EVERYTHING, Loss.IN_ORDER, Loss.ANYTHING, Loss.ANYTHING))
    disk = Disk(root)
    for event in events[:cut]:
        disk.apply(event)
    keeps_name, fate_of = _choices(loss or chosen, chance, disk.unsynced_numbers())
    entries = disk.entries(keeps_name=keeps_name, fate_of=fate_of)
    marks = tuple(event.data for event in events[:cut] if event.kind is Kind.MARK)
    return Image(seed, cut, loss or chosen, entries, marks)


def _cut(events: Sequence[Event], chance: random.Random, first: int) -> int:
    """Any event, or just before a sync: then most is unsynced."""
    before_syncs = [number for number, event in enumerate(events) if event.kind is Kind.SYNC and number >= first]
    if before_syncs and chance.random() < 0.3:
        return chance.choice(before_syncs)
    return chance.randint(first, len(events))


def _choices(loss: Loss, chance: random.Random, unsynced: list[int]) -> tuple[Callable[[int], bool], FateOf]:
    if loss is Loss.NOTHING:
        return lambda _: True, lambda _number, _sectors: (Fate.KEPT, ())
    if loss is Loss.EVERYTHING:
        return lambda _: False, lambda _number, _sectors: (Fate.DROPPED, ())
    if loss is Loss.IN_ORDER:
        # Mostly one of the last: there are files that no one ever syncs, whose writes are of all times.
        back = min(int(chance.expovariate(1 / 5)), len(unsynced) - 1)
        moment = unsynced[-1 - back] if unsynced else 0

        def in_order(number: int, sectors: range) -> tuple[Fate, Iterable[int]]:
            if number != moment:
                return (Fate.KEPT if number < moment else Fate.DROPPED), ()
            fate = chance.choice((Fate.TORN, Fate.ZEROED))
            return fate, sectors[: chance.randint(0, len(sectors))]

        return lambda number: number < moment, in_order
    rate, name_rate = chance.choice((0.2, 0.5, 0.9)), chance.choice((0.2, 0.5, 0.9))
    kept_names = {number for number in unsynced if chance.random() < name_rate}

    def by_itself(_number: int, sectors: range) -> tuple[Fate, Iterable[int]]:
        if chance.random() < rate:
            return Fate.KEPT, ()
        fate = chance.choice((Fate.DROPPED, Fate.TORN, Fate.ZEROED))
        return fate, [sector for sector in sectors if chance.random() < 0.5]

    return lambda number: number in kept_names, by_itself


def write_image(image: Image, folder: Path) -> None:
    """Write an image's files into the new folder `folder`."""
    folder.mkdir()
    for path, content in image.entries.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
