"""The check of requests: every field has a value of its type and within its bounds.

A field's type states its bounds (`fields.py`). A request is checked by `check_types` before it is executed, by one
expression that is compiled for its class. A remote call is sent unchecked; if the server cannot decode it, `refusal_of`
says why. The same function explains a decoded JSON body that does not fit, so that a value is refused with the same
words wherever it comes from.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from fastness.errors import FastnessError, InvalidArgument
from fastness.wire.fields import Rule

Fits = Callable[[Any], bool]

_SHOWN_CHARACTERS: Final = 60  # Of a value.
_OPTIONS_SHOWN: Final = 5  # Of a type that is one of many.
_WORDS: Final = {str: "a text", int: "a whole number", float: "a number", bytes: "bytes", bool: "True or False"}
_PLURALS: Final = {str: "texts", int: "whole numbers", float: "numbers", bytes: "bytes", bool: "booleans"}
_PLAIN_WORDS: Final = {**_WORDS, bytes: "a text in base64", bool: "true or false"}


def check_types(request: msgspec.Struct) -> None:
    """Return if every field of a request, and of the structs in it, has a value of its type and within its bounds.

    Raises:
        Validation: one has not. The text names the field, the value, and what to give instead.
    """
    kind = request.__class__
    if not _fits(kind)(request) and (refusal := refusal_of(kind, request)) is not None:
        raise refusal


def refusal_of(kind: Any, value: Any, *, plain: bool = False) -> FastnessError | None:
    """The error of the first field in `value` that has not its type, or is out of its bounds; None if there is none.

    `plain`: the value is decoded, but not converted: objects are dictionaries, and bytes may be text in base64.
    """
    found = _wrong(kind, value, _Place(), plain=plain)
    if found is None or not found.place.field:  # The value as a whole is something else.
        return None
    return _error_of(found, plain=plain)


def out_of_bounds(kind: Any, value: Any) -> FastnessError | None:
    """`refusal_of` a decoded value, if all of its fields have their types; otherwise None."""
    found = _wrong(kind, value, _Place(), plain=True)
    return _error_of(found, plain=True) if found is not None and found.place.field and found.fits_type else None


def check_argument(name: str, value: object, kind: Any) -> None:
    """Return if an argument has this type. For those that are used before they are in a request.

    Raises:
        InvalidArgument: it has not.
    """
    found = _wrong(kind, value, _Place(field=name), plain=False)
    if found is not None:
        raise _error_of(found, plain=False)


def refused_field(struct: type[msgspec.Struct], field: str, value: object, *, plain: bool = False) -> InvalidArgument:
    """The error of a field whose value is refused, for example because it is out of its bounds."""
    [kind] = [each.type for each in msgspec.structs.fields(struct) if each.name == field]
    return refused(field, value, _rule(kind, plain=plain))


def bounds_of(kind: Any) -> Mapping[str, Any]:
    """The bounds of a field of this type, as JSON Schema has them."""
    return next((each.bounds for each in _options(kind) if each.bounds), {})


def _error_of(found: "_Wrong", *, plain: bool) -> FastnessError:
    return found.error or refused(found.place.name, found.value, _rule(found.kind, plain=plain))


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
    """An expression that is true if the expression `value` has this type and is within its bounds."""
    options = _options(kind)
    if any(each.kind is Any for each in options):
        return "True"
    structs = [each.kind for each in options if _is_struct(each.kind)]
    terms = [f"{value} is None"] if any(each.kind is NoneType for each in options) else []
    for each in options:
        origin = get_origin(each.kind)
        if each.kind is float:
            term = f"({value}.__class__ is float or {value}.__class__ is int)"
        elif origin is not None:
            empty = ""
            if origin in (list, dict) and not each.bounds:  # They are mostly empty.
                empty = f"{value}.__class__ is {origin.__name__} and not {value} or "
            term = f"({empty}{_named(_container_fits(each.kind), names)}({value}))"
        elif each.kind is NoneType or each.kind in structs:
            continue
        else:
            term = f"{value}.__class__ is {_named(each.kind, names)}"
        terms.append(" and ".join([term, *_bound_terms(value, each, names)]))
    if structs:
        terms.append(f"{_named(_one_of(structs), names)}({value})")
    return f"({' or '.join(terms)})"


def _bound_terms(value: str, option: "_Option", names: dict[str, Any]) -> Iterator[str]:
    """Expressions that are all true if a value of the right type is within its bounds."""
    bounds = option.checked
    for keyword, term in (
        ("minimum", "{0} >= {1!r}"),
        ("maximum", "{0} <= {1!r}"),
        ("minLength", "len({0}) >= {1}"),
        ("maxLength", "len({0}) <= {1}"),
    ):
        if keyword in bounds:
            yield term.format(value, bounds[keyword])
    if "pattern" in bounds:
        yield f"{_named(_pattern(bounds['pattern']), names)}({value})"
    if option.rule is not None:
        yield f"{_named(option.rule.fits, names)}({value})"


@cache
def _pattern(text: str) -> Callable[[str], object]:
    return re.compile(text.replace("$", r"\Z")).match


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
    options = [each.kind for each in _options(kind)]
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


class _Wrong(NamedTuple):
    """A value that is refused: where it is, its type, and its error if that has a rule of its own."""

    place: _Place
    kind: Any
    value: Any
    error: FastnessError | None = None
    fits_type: bool = False  # It is only out of its bounds.


def _wrong(kind: Any, value: Any, place: _Place, *, plain: bool) -> _Wrong | None:
    """The first value in `value` that has not its type, or is out of its bounds."""
    options = _options(kind)
    kinds = [each.kind for each in options]
    if Any in kinds or (value is None and NoneType in kinds):
        return None
    structs = [each for each in kinds if _is_struct(each)]
    if plain and any(each.__struct_config__.array_like for each in structs):
        return None
    for struct in structs:
        if _is_meant(struct, value, plain=plain, alone=len(structs) == 1):
            return _wrong_in_struct(struct, value, place, plain=plain)
    others = [each for each in options if each.kind is not NoneType and not _is_struct(each.kind)]
    found = [_wrong_as(each, kind, value, place, plain=plain) for each in others]
    if None in found:
        return None
    # What is in a list or dictionary, or has an error of its own, says more.
    inner = [each for each in found if each is not None and (each.place != place or each.error is not None)]
    if inner:
        return inner[0]
    return _Wrong(place, kind, value, fits_type=any(each is not None and each.fits_type for each in found))


def _wrong_in_struct(kind: type[msgspec.Struct], value: Any, place: _Place, *, plain: bool) -> _Wrong | None:
    for field in msgspec.structs.fields(kind):
        if plain and field.encode_name not in value:
            continue
        each = value[field.encode_name] if plain else getattr(value, field.name)
        found = _wrong(field.type, each, place.at(kind.__name__, field.name), plain=plain)
        if found is not None:
            return found
    return None


def _wrong_as(option: "_Option", kind: Any, value: Any, place: _Place, *, plain: bool) -> _Wrong | None:
    """`_wrong` for one of the options of `kind`, which is no struct."""
    origin, args = get_origin(option.kind), get_args(option.kind)
    wrong = _Wrong(place, kind, value)
    if origin is Literal:
        fits = any(value == each and value.__class__ is each.__class__ for each in args)
        return None if fits else wrong
    if origin is None:
        if not _is_scalar(option.kind, value, plain=plain):
            return wrong
        return _out_of_bounds(option, wrong)
    parts: list[tuple[Any, Any, _Place]] = []
    if origin is dict and isinstance(value, dict):
        parts = [(args[0], name, place) for name in value]
        parts += [(args[1], each, place.within(name)) for name, each in value.items()]
    elif (
        origin is not dict
        and isinstance(value, list | tuple)
        and (not _is_fixed(option.kind) or len(value) == len(args))
    ):
        kinds = args if _is_fixed(option.kind) else [args[0]] * len(value)
        parts = [
            (part, each, place.within(number, has_others=len(value) > 1))
            for number, (part, each) in enumerate(zip(kinds, value, strict=True))
        ]
    else:
        return wrong
    found = (_wrong(part, each, where, plain=plain) for part, each, where in parts)
    return _out_of_bounds(option, wrong) or next((each for each in found if each is not None), None)


def _out_of_bounds(option: "_Option", wrong: _Wrong) -> _Wrong | None:
    """`wrong` if its value, which has the right type, is out of the bounds of the option."""
    names: dict[str, Any] = {"value": wrong.value}
    bounds = _bound_terms("value", option._replace(rule=None), names)
    wrong = wrong._replace(fits_type=True)
    if not all(eval(term, names) for term in bounds):
        return wrong
    if option.rule is not None and not option.rule.fits(wrong.value):
        try:
            option.rule.check(wrong.place.name, wrong.value)
        except FastnessError as error:
            return wrong._replace(error=error)
    return None


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


class _Option(NamedTuple):
    """One of the types that a value may have, and its bounds."""

    kind: Any
    bounds: Mapping[str, Any] = {}  # As JSON Schema has them, and the "words" for what is allowed.
    checked: Mapping[str, Any] = {}  # Those that a decoder checks.
    rule: Rule | None = None


@cache
def _options(kind: Any, *, metas: tuple[msgspec.Meta, ...] = ()) -> list[_Option]:
    """The types of a union; otherwise the type itself."""
    if get_origin(kind) is Annotated:
        inner, *own = get_args(kind)
        return _options(inner, metas=(*(each for each in own if isinstance(each, msgspec.Meta)), *metas))
    if get_origin(kind) in (Union, UnionType):
        return [each for part in get_args(kind) for each in _options(part, metas=metas)]
    if kind is msgspec.UnsetType:
        return []
    if kind is NoneType or kind is Any:
        return [_Option(kind)]
    checked: dict[str, Any] = {}
    described: dict[str, Any] = {}
    rule = None
    for meta in metas:
        for name, keyword in _KEYWORDS.items():
            if getattr(meta, name) is not None:
                checked[keyword] = getattr(meta, name)
        rule = (meta.extra or {}).get("rule", rule)
        described |= {key: text for key, text in (meta.extra or {}).items() if key == "words"}
        described |= meta.extra_json_schema or {}
    listed = checked
    if get_origin(kind) in (list, tuple):
        listed = {keyword.replace("Length", "Items"): each for keyword, each in checked.items()}
    return [_Option(kind, {**listed, **described}, checked, rule)]


_KEYWORDS: Final = {
    "ge": "minimum",
    "le": "maximum",
    "min_length": "minLength",
    "max_length": "maxLength",
    "pattern": "pattern",
}


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _is_fixed(kind: Any) -> bool:
    """Whether it is a tuple with a type for each of its items."""
    return get_origin(kind) is tuple and get_args(kind)[-1] is not ...


# What to give.


def _rule(kind: Any, *, plain: bool) -> str:
    options = [each for each in _options(kind) if each.kind is not NoneType]
    words = [word for each in options[:_OPTIONS_SHOWN] for word in _words(each, plain=plain)]
    if len(options) > _OPTIONS_SHOWN:
        words.append(f"of {len(options) - _OPTIONS_SHOWN} others")
    text = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    is_optional = len(options) < len(_options(kind))
    return f"{text}, or {'null' if plain else 'None'}" if is_optional else text


def _words(option: _Option, *, plain: bool) -> list[str]:
    """What a type is called; several words if there are few values."""
    kind, bounds = option.kind, option.bounds
    if "words" in bounds:
        return [bounds["words"]]
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return [repr(each) for each in args]
    if origin is dict:
        return [f"a {'JSON object' if plain else 'dictionary'} of {_plural(args[0])} to {_plural(args[1])}"]
    if _is_fixed(kind):
        return [f"a list of {len(args)}: {', '.join(_rule(each, plain=plain) for each in args)}"]
    if origin is not None:
        return [f"a list of {_counted(bounds)}{_plural(args[0])}"]
    if issubclass(kind, Enum):
        return [repr(each.value) if plain else f"{kind.__name__}.{each.name}" for each in kind]
    if _is_struct(kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        return ["a JSON object" if plain else f"{article} {kind.__name__}"]
    word = (_PLAIN_WORDS if plain else _WORDS).get(kind, kind.__name__)
    return [f"{word}{_range(kind, bounds)}"]


def _plural(kind: Any) -> str:
    """What several values of a type are called."""
    options = [each.kind for each in _options(kind) if each.kind is not NoneType]
    if len(options) > 1 or get_origin(options[0]) is Literal:
        return "values"
    origin, args = get_origin(options[0]), get_args(options[0])
    if origin is not None:
        return "dictionaries" if origin is dict else f"lists of {_plural(args[0])}"
    return _PLURALS.get(options[0], str(options[0].__name__))


def _counted(bounds: Mapping[str, Any]) -> str:
    """How many items a list has, followed by a space; empty if that is not limited."""
    if "maxItems" not in bounds:
        return ""
    return f"{bounds.get('minItems', 0)} to {bounds['maxItems']:,} "


def _range(kind: type, bounds: Mapping[str, Any]) -> str:
    if kind is str and "maxLength" in bounds:
        return f" of {bounds.get('minLength', 0)} to {bounds['maxLength']:,} characters"
    least, most = bounds.get("minimum"), bounds.get("maximum")
    if kind not in (int, float) or (least is None and most is None):
        return ""
    if most is None:
        return f" of at least {_number(least)}"
    return f" of at most {_number(most)}" if least is None else f" from {_number(least)} to {_number(most)}"


def _number(bound: Any) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:,.15g}"
