"""The arrays of MXNet's optimizer states (``.states``), which are pickles, read without running anything in them.

A pickle is a program for a small machine with a stack. The steps that build values are made here; those that would
import or call something leave a note of its name, ``Named`` and ``Made``, and nothing is imported or called. MXNet's
arrays are then bytes in such a note, in the format of ``.params``.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore.checkpoint.mxnet_params import MXNetArray, MXNetFile, parsed_array
from kvstore.errors import CheckpointError

PUSHES = {"INT", "LONG", "FLOAT", "UNICODE", "STRING", "BINFLOAT", "BINSTRING"}
PUSHES |= {f"BININT{size}" for size in ("", 1, 2)} | {"LONG1", "LONG4"}
PUSHES |= {f"{size}BIN{kind}" for size in ("", "SHORT_") for kind in ("UNICODE", "BYTES", "STRING")}
PUSHES |= {"BINUNICODE8", "BINBYTES8", "BYTEARRAY8"}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
DEPTH = 4  # of tuples in a state


class Named(NamedTuple):
    """Something that a program would import."""

    module: str
    name: str


class Made:
    """Something that a program would make by calling ``kind``, and then give ``state``."""

    def __init__(self, kind: Any, args: Any) -> None:
        self.kind, self.args = kind, args
        self.state: Any = None


def read_states(path: Path) -> MXNetFile:
    """Return the arrays of a file of states, by names: ``3``, or ``3.0`` and ``3.1``, of parameter 3.

    Raises:
        CheckpointError: it is no such file, or is damaged.
    """
    try:
        value = run(path.read_bytes())
        # A trainer of Gluon's saves its optimizer, too: rates and counts of updates, in an object of MXNet's.
        states = value[0] if isinstance(value, tuple) and value else value
        if not isinstance(states, dict) or not all(isinstance(index, int | str) for index in states):
            raise ValueError("it has no dict of states by the numbers of parameters")
        named = [pair for index, state in states.items() for pair in _arrays(f"{index}", state, DEPTH)]
        if len({id(made) for _, made in named}) < len(named):  # few bytes could name one array any number of times
            raise ValueError("an array is in it twice")
        return MXNetFile([_array(made) for _, made in named], [name for name, _ in named])
    except OSError as exc:
        raise CheckpointError(f"{path}: missing or unreadable ({exc.strerror})") from None
    except (ArithmeticError, AttributeError, CheckpointError, LookupError, TypeError, ValueError) as exc:
        raise CheckpointError(f"{path}: no states of MXNet's, or damaged: {exc}") from None


def _arrays(name: str, state: Any, depth: int) -> Iterator[tuple[str, Made]]:
    if isinstance(state, Made):
        yield name, state
    elif isinstance(state, tuple | list) and depth:
        for number, part in enumerate(state):
            yield from _arrays(f"{name}.{number}", part, depth - 1)
    elif state is not None:
        raise ValueError(f"state {name} is neither an array nor a tuple of arrays")


def _array(made: Made) -> MXNetArray:
    handle = made.state.get("handle") if isinstance(made.state, dict) else None
    if not isinstance(made.kind, Named) or not made.kind.module.startswith("mxnet.") or not isinstance(handle, bytes):
        raise ValueError("it has something in place of an array of MXNet's")
    return parsed_array(np.frombuffer(bytearray(handle), np.uint8))


def run(data: bytes) -> Any:
    """Return the value that a pickle describes, with notes in place of what it would import and call.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: it is no pickle, or has a step that states have not.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    for opcode, arg, _ in pickletools.genops(data):
        name = opcode.name
        if name in PUSHES:
            stack.append(bytes(arg) if isinstance(arg, bytearray) else arg)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if name == "EMPTY_DICT" else [])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("TUPLE", "LIST"):
            items = since_mark()
            stack.append(tuple(items) if name == "TUPLE" else items)
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            size = int(name[-1])
            stack[-size:] = [tuple(stack[-size:])]
        elif name == "DICT":
            items = since_mark()
            stack.append(dict(zip(items[::2], items[1::2], strict=True)))
        elif name in ("SETITEM", "SETITEMS"):
            items = since_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name in ("APPEND", "APPENDS"):
            items = since_mark() if name == "APPENDS" else [stack.pop()]
            stack[-1].extend(items)
        elif name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if name == "MEMOIZE" else arg] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[arg])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            module, word = f"{arg}".split(" ", 1) if name == "GLOBAL" else (stack.pop(-2), stack.pop())
            if not isinstance(module, str) or not isinstance(word, str):
                raise ValueError("it imports what has no name")
            stack.append(Named(module, word))
        elif name in ("REDUCE", "NEWOBJ"):
            args, kind = stack.pop(), stack.pop()
            stack.append(_made(kind, args))
        elif name == "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], Made):
                raise ValueError(f"it gives a state to a {type(stack[-1]).__name__}")
            stack[-1].state = state
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"it has the step {name}, which states have not")
    raise ValueError("it does not end")


def _made(kind: Any, args: Any) -> Any:
    """Return what a call would make: bytes, as the older protocols write them, or a note."""
    match kind, args:
        case Named("builtins" | "__builtin__", "bytearray"), (bytes(data),):
            return data
        case Named("builtins" | "__builtin__", "bytearray"), (str(data), "latin-1"):
            return data.encode("latin-1")
        case Named("_codecs", "encode"), (str(data), "latin1"):
            return data.encode("latin-1")
    return Made(kind, args)
