"""What to say where a call has arguments that the callee does not take, or lacks one that it needs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, cast

T = TypeVar("T", bound=Callable[..., Any])


def answers_wrong_calls(
    ways: Mapping[str, str],
    note: str = "",
    *,
    callee: str = "",
    beyond: Callable[[Any], str] | None = None,
) -> Callable[[T], T]:
    """Makes a function, or the constructor of a class, say what to write where Python would refuse the call.

    ways: what to write for the arguments of other libraries, by name. note: a sentence that follows where one of these
    is given, where an argument is missing, where there are too many, and where a field of a class is of a wrong type.
    beyond: what to write for the first argument too many by position. A right call costs one more frame.

    >>> @answers_wrong_calls({"size": "write width=size"})
    ... def box(width, *, depth=1): ...
    >>> box(size=3)
    Traceback (most recent call last):
    ...
    TypeError: box has no argument 'size'; write width=size.
    """

    def decorate(target: T) -> T:
        made = isinstance(target, type)
        fn = cast(Any, target).__init__ if made else target
        name = callee or (target.__name__ if made else fn.__qualname__.removesuffix(".__init__"))

        @functools.wraps(fn)
        def checked(*args: Any, **named: Any) -> Any:
            try:
                return fn(*args, **named)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # raised inside of fn
                    if note and made and str(error).startswith(f"{name}."):
                        raise TypeError(f"{error} {note}") from None
                    raise
                said = _complaint(fn, name, args, named, ways, note, beyond)
                raise TypeError(said or str(error)) from None

        if not made:
            return cast(T, checked)
        setattr(target, "__init__", checked)  # noqa: B010
        return cast(T, target)

    return decorate


def _complaint(
    fn: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    named: dict[str, Any],
    ways: Mapping[str, str],
    note: str,
    beyond: Callable[[Any], str] | None,
) -> str | None:
    """The sentence for a call that fn cannot be called with."""
    parameters = list(inspect.signature(fn).parameters.values())
    if parameters and parameters[0].name == "self":
        parameters, args = parameters[1:], args[1:]
    known = [p.name for p in parameters]
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    after = f" {note}" if note else ""
    unknown = [key for key in named if key not in known]
    if unknown:
        return no_argument(name, unknown, known, ways, after)
    if len(args) > len(by_position):
        if not known:
            return f"{name} takes no arguments, and {kind_of(args[0])} is given.{after}"
        extra = args[len(by_position)]
        way = "name what follows" if beyond is None else beyond(extra)
        takes = f"{name} takes {' and '.join(by_position)} by position"
        return f"{takes}; the next argument is {kind_of(extra)}: {way}.{after}"
    given = {*by_position[: len(args)], *named}
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in given]
    if not missing:
        return None
    has = f"; it has {', '.join(known)}" if len(known) > len(missing) else ""
    return f"{name} needs {' and '.join(missing)}{has}.{after}"


def no_argument(
    name: str, unknown: Collection[str], known: Collection[str], ways: Mapping[str, str], after: str = ""
) -> str:
    """The sentence for arguments by names that a callee does not have; `after` follows where ways has one of them."""
    found = [ways[key] for key in unknown if key in ways]
    close = [match for key in unknown if key not in ways for match in get_close_matches(key, known, 1, 0.7)]
    said = "; ".join(dict.fromkeys(found + [f"did you mean {match}?" for match in close]))
    if not said:
        *first, last = known or ["no arguments"]
        said = f"it has {', '.join(first)} and {last}" if first else f"it has {last}"
    which = f"argument{'s' * (len(unknown) > 1)} {', '.join(map(repr, unknown))}"
    return f"{name} has no {which}; {said}{'' if said.endswith('?') else '.'}{after if found else ''}"


def kind_of(x: Any) -> str:
    """What came instead, as messages say it.

    >>> kind_of(3), kind_of(None), kind_of(int)
    ('an int', 'None', 'the class int, not one of its values')
    """
    if x is None:
        return "None"
    if isinstance(x, type):
        return f"the class {x.__name__}, not one of its values"
    name = type(x).__name__
    dtype = f" of {str(x.dtype).removeprefix('torch.')}" if hasattr(x, "dtype") else ""
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}{dtype}"


def instead_of(x: Any) -> str:
    """What to write for x where a tensor is expected, as the end of a message: what its class says of itself.

    >>> class Rows:
    ...     instead_of_tensor = "pass its numbers"
    >>> instead_of(Rows()), instead_of(3)
    (': pass its numbers', '')
    """
    way = getattr(x, "instead_of_tensor", "")
    return f": {way}" if way else ""


def check_parameters(fn: Any, name: str, parameters: tuple[str, ...], example: str = "") -> None:
    """TypeError, naming the argument, where fn is no function of that many arguments.

    >>> check_parameters(lambda i, j: i >= j, "Where.fn", ("b", "h", "i", "j"))
    Traceback (most recent call last):
    ...
    TypeError: Where.fn cannot be called as fn(b, h, i, j): too many positional arguments.
    """
    if not callable(fn):
        raise TypeError(f"{name} is {kind_of(fn)}; expected a function of {', '.join(parameters)}.")
    try:
        inspect.signature(fn).bind(*parameters)
    except ValueError:  # a function without a signature
        return
    except TypeError as cause:
        way = f" Write it as in {example}." if example else ""
        raise TypeError(f"{name} cannot be called as fn({', '.join(parameters)}): {cause}.{way}") from None


def no_name(module: str, name: str, known: Collection[str], elsewhere: Mapping[str, str]) -> AttributeError:
    """The error for a name that a module does not have; elsewhere: what to write for some, by name.

    >>> no_name("regard", "Softcap", ["SoftCap", "Causal"], {})
    AttributeError("module 'regard' has no attribute 'Softcap'; did you mean SoftCap?")
    """
    error = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):
        return AttributeError(error)
    plain = {_plain(each): each for each in reversed(list(known))}
    other = {_plain(each): way for each, way in elsewhere.items()}
    if _plain(name) in other:
        return AttributeError(f"{error}; {other[_plain(name)]}.")
    begun = [each for each in plain if _begins(name, each)]
    close = [_plain(name)] if _plain(name) in plain else [each for each in begun if "." not in plain[each]] or begun
    close = close or get_close_matches(_plain(name), plain, 3, 0.7)
    return AttributeError(f"{error}; did you mean {' or '.join(plain[each] for each in close)}?" if close else error)


def _begins(name: str, other: str) -> bool:
    """Whether a name is the beginning of another one, and long enough to mean it: relative, relativebias."""
    return len(_plain(name)) >= 4 and other.startswith(_plain(name))


def _plain(name: str) -> str:
    """nn.SoftCap, soft_cap -> softcap."""
    return name.rsplit(".", 1)[-1].replace("_", "").lower()


def public_names(module: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The classes and functions of regard that a module's dictionary holds: its public names."""
    return [
        prefix + name
        for name, x in module.items()
        if not name.startswith("_") and str(getattr(x, "__module__", "")).startswith("regard.")
    ]
