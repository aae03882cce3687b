"""The programs of a problem's functions, or why there are none; each is made once."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import TypeVar
from weakref import WeakKeyDictionary

from regard.backends.native.programs.code import NotLowered
from regard.backends.native.programs.graph import NotTraced
from regard.backends.native.programs.lower import Program
from regard.call.problem import Problem
from regard.core.errors import Unsupported
from regard.core.shapes import count_of

Made = TypeVar("Made")


def made_or_reason(make: Callable[[], Made]) -> Made | str:
    """What `make` returns; where it has no program, why, as a clause.

    Raises Unsupported, as `make` does for functions that no backend computes: the user is told what to write instead.
    """
    try:
        return make()
    except (NotTraced, NotLowered) as why:
        return str(why)
    except Unsupported:
        raise
    except Exception as error:  # of a use of an operation that is not supported here, and which PyTorch may support
        return f"{type(error).__name__} was raised while its program was made ({error})"


def described(rows: Sized, operands: Sized) -> str:
    """A program for `explain`: how many instructions it has, and how many tensors it reads."""
    read = f", which reads {count_of(len(operands), 'tensor')}" if operands else ""
    return f"a program of {count_of(len(rows), 'instruction')}{read}"


class ProgramsOfProblems:
    """The programs of each problem, one for each set of gradients that are wanted: of which tensors; () of none.

    lower: makes one, see made_or_reason.
    """

    def __init__(self, lower: Callable[[Problem, tuple[bool, ...]], Program]) -> None:
        self._lower = lower
        self._made: WeakKeyDictionary[Problem, dict[tuple[bool, ...], Program | str]] = WeakKeyDictionary()

    def __call__(self, problem: Problem, wanted: tuple[bool, ...] = ()) -> Program | str:
        made = self._made.setdefault(problem, {})
        if wanted not in made:
            made[wanted] = made_or_reason(lambda: self._lower(problem, wanted))
        return made[wanted]
