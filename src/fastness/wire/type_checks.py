"""The types of requests, and what is said about a value that is refused.

    priority is 'high'; give a whole number from 0 to 9

What arrives from outside is decoded, which checks its types. What is built in this process may have any values: an
embedded call checks its request with `check_types`. A remote call is encoded as it is; if the server cannot decode it,
`refusal_of` says why. The same function explains a decoded JSON body that does not fit.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from fastness.errors import InvalidArgument
from fastness.wire.bounds import bounds_of

Fits = Callable[[Any], bool]
BoundsOf = Callable[[str, str], Mapping[str, Any]]  # The bounds of a field, by the name of its struct and its own.

_SHOWN_CHARACTERS: Final = 60  # Of a value.
_OPTIONS_SHOWN: Final = 5  # Of a type that is one of many.
_WORDS: Final = {str: "a text", int: "a whole number", float: "a number", bytes: "bytes", bool: "True or False"}
_PLURALS: Final = {str: "texts", int: "whole numbers", float: "numbers", bytes: "bytes", bool: "booleans"}
_PLAIN_WORDS: Final = {**_WORDS, bytes: "a text in base64", bool: "true or false"}


def check_types(request: msgspec.Struct) -> None:
    """Return if every field of a request, and of the structs in it, has a value of its type.

    Raises:
        InvalidArgument: one has not. The text names the field, the value, and what to give instead.
    """
    kind = request.__class__
    if not _fits(kind)(request) and (refusal := refusal_of(kind, request)) is not None:
        raise refusal


def refusal_of(kind: Any, value: Any, *, plain: bool = False, bounds: BoundsOf = bounds_of) -> InvalidArgument | None:
    """The error of the first field in `value` that has not its type; None if there is none.

    `plain`: the value is decoded, but not converted: objects are dictionaries, and bytes may be text in base64.
    """
    found = _wrong(kind, value, _Place(), plain=plain)
    if found is None or not found[0].field:  # The value as a whole is something else.
        return None
    place, kind, value = found
    rule = _rule(kind, {} if place.item else bounds(place.struct, place.field), plain=plain)
    return refused(place.name, value, rule)


def check_argument(name: str, value: object, kind: Any) -> None:
    """Return if an argument has this type. For those that are used before they are in a request.

    Raises:
        InvalidArgument: it has not.
    """
    found = _wrong(kind, value, _Place(field=name), plain=False)
    if found is not None:
        place, kind, value = found
        raise refused(place.name, value, _rule(kind, {}, plain=False))


def refused_field(struct: type[msgspec.Struct], field: str, value: object, *, plain: bool = False) -> InvalidArgument:
    """The error of a field whose value is refused, for example because it is out of its bounds."""
    [kind] = [each.type for each in msgspec.structs.fields(struct) if each.name == field]
    return refused(field, value, _rule(kind, bounds_of(struct.__name__, field), plain=plain))


def refused(field: str, value: object, rule: str) -> InvalidArgument:
    """The error of a value that is refused: which field, what it is, and what to give."""
    return InvalidArgument(f"{field} is {_shown(value)}; give {rule}")


def _shown(value: object) -> str:
    """A value, shortened: it may be of any length."""
    if isinstance(value, str | bytes):
        value = value[: _SHOWN_CHARACTERS + 1]
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


# Whether a struct fits.


@cache
def _fits(kind: type[msgspec.Struct]) -> Fits:
    """A function that says whether a value is of this class, and its fields have exactly their types.

    It is one expression, compiled for the class: for a put, a loop over the fields takes three times as long. What does
    not fit exactly may still be accepted, such as a member of an enumeration of texts: `refusal_of` decides.
    """
    names: dict[str, Any] = {"kind": kind}
    terms = ["value.__class__ is kind"]
    terms += [_term(f"value.{field.name}", field.type, names) for field in msgspec.structs.fields(kind)]
    fits: Fits = eval(f"lambda value: {' and '.join(terms)}", names)
    return fits


def _term(value: str, kind: Any, names: dict[str, Any]) -> str:
    """An expression that is true if the expression `value` has this type."""
    options = _options(kind)
    if Any in options:
        return "True"
    structs = [each for each in options if _is_struct(each)]
    terms = [f"{value} is None"] if NoneType in options else []
    for each in options:
        origin = get_origin(each)
        if each is float:
            terms.append(f"{value}.__class__ is float or {value}.__class__ is int")
        elif origin is not None:
            if origin in (list, dict):  # They are mostly empty.
                terms.append(f"{value}.__class__ is {origin.__name__} and not {value}")
            terms.append(f"{_named(_container_fits(each), names)}({value})")
        elif each is not NoneType and each not in structs:
            terms.append(f"{value}.__class__ is {_named(each, names)}")
    if structs:
        terms.append(f"{_named(_one_of(structs), names)}({value})")
    return f"({' or '.join(terms)})"


def _named(value: object, names: dict[str, Any]) -> str:
    name = f"v{len(names)}"
    names[name] = value
    return name


def _one_of(structs: list[type[msgspec.Struct]]) -> Fits:
    if len(structs) == 1:
        return _fits(structs[0])
    by_kind: dict[type, Fits] = {kind: _fits(kind) for kind in structs}

    def fits(value: object) -> bool:
        found = by_kind.get(value.__class__)
        return found is not None and found(value)

    return fits


def _container_fits(kind: Any) -> Fits:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        kinds, values = frozenset(map(type, args)), frozenset(args)
        return lambda value: value.__class__ in kinds and value in values
    if origin is dict:
        key_fits, value_fits = map(_item_fits, args)
        return lambda value: (
            value.__class__ is dict and all(key_fits(name) and value_fits(each) for name, each in value.items())
        )
    if _is_fixed(kind):
        fit = [*map(_item_fits, args)]
        return lambda value: (
            value.__class__ in (tuple, list)
            and len(value) == len(fit)
            and all(one(each) for one, each in zip(fit, value, strict=True))
        )
    item_fits = _item_fits(args[0])

    def fits(value: Any) -> bool:
        if value.__class__ is not list and value.__class__ is not tuple:
            return False
        for each in value:  # noqa: SIM110 - `all` takes twice as long for one item.
            if not item_fits(each):
                return False
        return True

    return fits


def _item_fits(kind: Any) -> Fits:
    options = _options(kind)
    if all(map(_is_struct, options)):
        return _one_of(options)
    names: dict[str, Any] = {}
    fits: Fits = eval(f"lambda value: {_term('value', kind, names)}", names)
    return fits


# Which field does not.


class _Place(NamedTuple):
    """A field of a struct, and where the struct is in the request."""

    struct: str = ""
    field: str = ""
    item: str = ""  # Of a list or dictionary that is the field.
    outer: str = ""  # The field, and the item, that is the struct.
    is_one_of_many: bool = False  # The struct is in a list with others.
    has_others: bool = False  # The item is.

    @property
    def name(self) -> str:
        where = f" of {self.outer}" if self.is_one_of_many else ""
        return f"{self.field}{self.item}{where}"

    def at(self, struct: str, field: str) -> "_Place":
        """A field of the struct that is here."""
        outer = f"{self.outer}.{self.field}{self.item}".strip(".")
        return _Place(struct, field, outer=outer, is_one_of_many=self.is_one_of_many or self.has_others)

    def within(self, item: object, *, has_others: bool = False) -> "_Place":
        """An item of the list or dictionary that is here."""
        return self._replace(item=f"{self.item}[{item!r}]", has_others=self.has_others or has_others)


_Wrong = tuple[_Place, Any, Any]  # Where the value is, its type, and the value.


def _wrong(kind: Any, value: Any, place: _Place, *, plain: bool) -> _Wrong | None:
    """The first value in `value` that has not its type."""
    options = _options(kind)
    if Any in options or (value is None and NoneType in options):
        return None
    structs = [each for each in options if _is_struct(each)]
    if plain and any(each.__struct_config__.array_like for each in structs):
        return None
    for struct in structs:
        if _is_meant(struct, value, plain=plain, alone=len(structs) == 1):
            return _wrong_in_struct(struct, value, place, plain=plain)
    others = [each for each in options if each is not NoneType and not _is_struct(each)]
    found = [_wrong_as(each, value, place, plain=plain) for each in others]
    if None in found:
        return None
    inner = [each for each in found if each is not None and each[0] != place]  # In a list or dictionary.
    return inner[0] if inner else (place, kind, value)


def _wrong_in_struct(kind: type[msgspec.Struct], value: Any, place: _Place, *, plain: bool) -> _Wrong | None:
    for field in msgspec.structs.fields(kind):
        if plain and field.encode_name not in value:
            continue
        each = value[field.encode_name] if plain else getattr(value, field.name)
        found = _wrong(field.type, each, place.at(kind.__name__, field.name), plain=plain)
        if found is not None:
            return found
    return None


def _wrong_as(kind: Any, value: Any, place: _Place, *, plain: bool) -> _Wrong | None:
    """`_wrong` for a type that is neither a union nor a struct."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        fits = any(value == each and value.__class__ is each.__class__ for each in args)
        return None if fits else (place, kind, value)
    if origin is None:
        return None if _is_scalar(kind, value, plain=plain) else (place, kind, value)
    parts: list[tuple[Any, Any, _Place]] = []
    if origin is dict and isinstance(value, dict):
        parts = [(args[0], name, place) for name in value]
        parts += [(args[1], each, place.within(name)) for name, each in value.items()]
    elif origin is not dict and isinstance(value, list | tuple) and (not _is_fixed(kind) or len(value) == len(args)):
        kinds = args if _is_fixed(kind) else [args[0]] * len(value)
        parts = [
            (part, each, place.within(number, has_others=len(value) > 1))
            for number, (part, each) in enumerate(zip(kinds, value, strict=True))
        ]
    else:
        return place, kind, value
    found = (_wrong(part, each, where, plain=plain) for part, each, where in parts)
    return next((each for each in found if each is not None), None)


def _is_scalar(kind: type, value: Any, *, plain: bool) -> bool:
    if plain:
        try:
            msgspec.convert(value, kind, builtin_types=(bytes,) if isinstance(value, bytes) else None)
        except msgspec.ValidationError:
            return False
        return True
    kinds = (float, int) if kind is float else (kind,)
    # A member of an enumeration of texts or whole numbers is encoded as its value.
    return value.__class__ in kinds or (
        isinstance(value, Enum) and isinstance(value, str | int) and isinstance(value, kinds)
    )


def _is_meant(kind: type[msgspec.Struct], value: Any, *, plain: bool, alone: bool) -> bool:
    """Whether a value is to be a struct of this class, as one of several or alone."""
    if not plain:
        return value.__class__ is kind
    config = kind.__struct_config__
    return isinstance(value, dict) and (alone or value.get(config.tag_field or "") == config.tag)


def _options(kind: Any) -> list[Any]:
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return [each for each in options if each is not msgspec.UnsetType]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _is_fixed(kind: Any) -> bool:
    """Whether it is a tuple with a type for each of its items."""
    return get_origin(kind) is tuple and get_args(kind)[-1] is not ...


# What to give.


def _rule(kind: Any, bounds: Mapping[str, Any], *, plain: bool) -> str:
    options = [each for each in _options(kind) if each is not NoneType]
    words = [word for each in options[:_OPTIONS_SHOWN] for word in _words(each, bounds, plain=plain)]
    if len(options) > _OPTIONS_SHOWN:
        words.append(f"of {len(options) - _OPTIONS_SHOWN} others")
    text = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    return f"{text}, or {'null' if plain else 'None'}" if NoneType in _options(kind) else text


def _words(kind: Any, bounds: Mapping[str, Any], *, plain: bool) -> list[str]:
    """What a type is called; several words if there are few values."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return [repr(each) for each in args]
    if origin is dict:
        return [f"a {'JSON object' if plain else 'dictionary'} of {_plural(args[0])} to {_plural(args[1])}"]
    if _is_fixed(kind):
        return [f"a list of {len(args)}: {', '.join(_rule(each, {}, plain=plain) for each in args)}"]
    if origin is not None:
        return [f"a list of {_plural(args[0])}"]
    if issubclass(kind, Enum):
        return [repr(each.value) if plain else f"{kind.__name__}.{each.name}" for each in kind]
    if _is_struct(kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        return ["a JSON object" if plain else f"{article} {kind.__name__}"]
    word = (_PLAIN_WORDS if plain else _WORDS).get(kind, kind.__name__)
    return [f"{word}{_range(kind, bounds)}"]


def _plural(kind: Any) -> str:
    """What several values of a type are called."""
    options = [each for each in _options(kind) if each is not NoneType]
    if len(options) > 1 or get_origin(options[0]) is Literal:
        return "values"
    origin, args = get_origin(options[0]), get_args(options[0])
    if origin is not None:
        return "dictionaries" if origin is dict else f"lists of {_plural(args[0])}"
    return _PLURALS.get(options[0], str(options[0].__name__))


def _range(kind: type, bounds: Mapping[str, Any]) -> str:
    if kind is str and "maxLength" in bounds:
        return f" of {bounds.get('minLength', 0)} to {bounds['maxLength']:,} characters"
    least, most = bounds.get("minimum"), bounds.get("maximum")
    if kind not in (int, float) or (least is None and most is None):
        return ""
    if most is None:
        return f" of at least {least:,.15g}"
    return f" of at most {most:,.15g}" if least is None else f" from {least:,.15g} to {most:,.15g}"
