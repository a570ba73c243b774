"""Interprets a pickle without Python's own machine for it: values are built, and nothing is imported or called.

A pickle is a program for a stack machine. Two of its instructions name a class or a function and call it, which is how
a hostile file runs code. Here names stand for nothing but themselves; a call of one of a few *known* names yields a
value of this module, and any other name is refused when it comes up, called or not.
"""

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Name:
    """A class or a function that a pickle names: its module and its name in it."""

    module: str
    name: str


@dataclass
class Inert:
    """An object of a known class: its attributes, without its class.

    Attributes:
        name: of the class.
        attributes: what the pickle sets.
    """

    name: str
    attributes: dict[Any, Any] = field(default_factory=dict)


Call = Callable[..., Any]
Known = Mapping[tuple[str, str], Call | None]
"""What calling a name yields; None: a name that is only mentioned."""

_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def interpret(program: bytes, known: Known, persistent: Call, shown: object) -> Any:
    """The value that a pickle describes.

    Args:
        program: the pickle.
        known: the names that it may use.
        persistent: the value for an identifier of something outside the pickle, such as a storage.
        shown: the name of its file in messages.

    Raises:
        ValueError: for a name that is not known, or a program that is damaged or does anything else.
    """
    machine = _Machine(known, persistent)
    try:
        for instruction, argument, _ in pickletools.genops(program):
            if instruction.name == "STOP":
                (value,) = machine.stack
                return value
            machine.step(instruction.name, argument)
        raise ValueError("it does not end")
    except UnknownNameError as error:
        raise ValueError(f"Expected only values that are known to be harmless in {shown}, got {error}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"Expected an undamaged pickle in {shown}, got {type(error).__name__}: {error}") from error


class UnknownNameError(Exception):
    """A pickle names something that it may not."""


class _Machine:
    """The stack and the memory of a program; see `interpret`."""

    def __init__(self, known: Known, persistent: Call) -> None:
        self.stack: list[Any] = []
        self._known = known
        self._persistent = persistent
        self._memory: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Carry out one instruction."""
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            self.stack.append(argument)
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            count = _TUPLES[name]
            if len(self.stack) < count:
                raise IndexError("the stack is too short")
            self.stack[-count:] = [tuple(self.stack[-count:])]
        else:
            handler = getattr(self, f"_{name.lower()}", None)
            if handler is None:
                raise UnknownNameError(f"the instruction {name}.")
            handler(argument)

    # Order

    def _proto(self, argument: int) -> None:
        if argument > 5:
            raise ValueError(f"a protocol {argument}")

    def _frame(self, argument: int) -> None:
        """Only says how far to read ahead."""

    def _mark(self, _: None) -> None:
        self.stack.append(_MARK)

    def _since_mark(self) -> list[Any]:
        place = max(place for place, value in enumerate(self.stack) if value is _MARK)
        values = self.stack[place + 1 :]
        del self.stack[place:]
        return values

    # Memory

    def _binput(self, argument: int) -> None:
        self._memory[argument] = self.stack[-1]

    _long_binput = _binput

    def _memoize(self, _: None) -> None:
        self._memory[len(self._memory)] = self.stack[-1]

    def _binget(self, argument: int) -> None:
        self.stack.append(self._memory[argument])

    _long_binget = _binget

    # Containers

    def _tuple(self, _: None) -> None:
        self.stack.append(tuple(self._since_mark()))

    def _append(self, _: None) -> None:
        value = self.stack.pop()
        self._top(list).append(value)

    def _appends(self, _: None) -> None:
        values = self._since_mark()
        self._top(list).extend(values)

    def _additems(self, _: None) -> None:
        values = self._since_mark()
        self._top(set).update(values)

    def _setitem(self, _: None) -> None:
        key, value = self.stack[-2:]
        del self.stack[-2:]
        self._top(dict)[key] = value

    def _setitems(self, _: None) -> None:
        values = self._since_mark()
        self._top(dict).update(zip(values[::2], values[1::2], strict=True))

    def _top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise TypeError(f"a {type(self.stack[-1]).__name__} in the place of a {kind.__name__}")
        return self.stack[-1]

    # Names and objects

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._name(module, name)

    def _stack_global(self, _: None) -> None:
        module, name = self.stack[-2:]
        del self.stack[-2:]
        self._name(module, name)

    def _name(self, module: Any, name: Any) -> None:
        if (module, name) not in self._known:
            raise UnknownNameError(f"the name {module}.{name}. Load the file with its library, and save plain values.")
        self.stack.append(Name(module, name))

    def _reduce(self, _: None) -> None:
        called, arguments = self.stack[-2:]
        del self.stack[-2:]
        call = self._known[called.module, called.name] if isinstance(called, Name) else None
        if call is None or type(arguments) is not tuple:
            raise UnknownNameError(f"a call of {called!r:.200}.")
        self.stack.append(call(*arguments))

    _newobj = _reduce

    def _build(self, _: None) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Inert) and type(state) is dict:
            target.attributes.update(state)
        elif type(target) is not dict:  # an OrderedDict may have attributes, which say nothing about its items
            raise UnknownNameError(f"a state for a {type(target).__name__}.")

    def _binpersid(self, _: None) -> None:
        self.stack.append(self._persistent(self.stack.pop()))
