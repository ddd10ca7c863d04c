"""Checks the methods of a user's trainer or callback when it is built: nothing in it may be meant as an override and never be
called, and each override must be callable as the system calls it."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from gangway.config.section import did_you_mean
from gangway.errors import UsageError

PACKAGE = __name__.partition(".")[0]
NEAR = 0.85
"""The similarity from which on a name is taken for a misspelt one."""
NEAR_OF_HELPER = 0.9
"""The same for a name that begins with `_`, as those of helpers do."""
CALLED_WITH = {"evaluate": 1, "eval": 1}
"""How many arguments the system passes, of methods to which it does not pass all that they must take."""
CALLED_OF_A_TASK = (
    *("build_model", "loss", "predictions", "set_step_nr", "build_frozen", "check_rows", "encode", "decode"),
    *("tokens_per_example", "flops_per_token", "context_length", "ids", "reads_base"),
)
"""All that the system reads of a task. Of its own classes it may read more."""
OTHERWISE = "(is it your program's own, with this name? Mark it with `trainers.overrides.own_method`)"
OWN, SHOWS = "_is_own_method", "_shows_what_is_made_by"
Method = TypeVar("Method", bound=Callable[..., Any])
PROPERTIES = (property, functools.cached_property)
METHODS = (*PROPERTIES, classmethod, staticmethod, functools.partialmethod)
"""Kinds of methods that are not callable themselves."""


def own_method(method: Method) -> Method:
    """Marks a method of a trainer, a task or a callback that your program calls itself, though its name is that of a method of
    another system, or nearly that of a hook."""
    setattr(method, OWN, True)
    return method


def shows(made_by: str) -> Callable[[Method], Method]:
    """Marks a property of a trainer that only shows what `made_by` makes: an override of it would have no effect."""

    def mark(getter: Method) -> Method:
        setattr(getter, SHOWS, made_by)
        return getter

    return mark


def check_overrides(cls: type, elsewhere: Mapping[str, str], called: Collection[str] = ()) -> None:
    """Raises UsageError for methods of a user's class that nothing would call, and for overrides whose signature is another.
    `elsewhere` says what to do instead, by names of other systems. `cls` inherits from a class of this package, or `called` has
    the names that the system calls, with whatever they take.

    A method with another name than ours is taken for a helper of the user's program, but for two kinds of names: those of
    `elsewhere`, and those that are nearly one of ours or of `elsewhere`.
    """
    ours: dict[str, Any] = dict.fromkeys(called)
    ours |= {name: value for base in reversed(cls.__mro__) if _is_ours(base) for name, value in vars(base).items()}
    theirs = _members(cls)
    if not theirs:
        return
    _check_all(
        cls.__name__,
        "has methods that nothing would call",
        _never_called(cls, theirs, ours, elsewhere),
    )
    if called:
        return
    _check_all(cls.__name__, "overrides what only shows what there is", {name: _shown_only(ours.get(name)) for name in theirs})
    alike = {name: _mismatch(name, value, ours[name]) for name, value in theirs.items() if name in ours}
    _check_all(cls.__name__, "overrides what the trainer calls, but not so that it can be called", alike)


def check_hooks(trainer: object, uses: Mapping[str, tuple[bool, str]]) -> None:
    """Raises UsageError if an override was set on the object, where it is not looked for; and for hooks that a class of the user
    overrides, and that are not called as the run is set up: `uses` has, by name, whether a hook is called, and else what
    to do."""
    cls, name = type(trainer), type(trainer).__name__
    wrong = {
        member: "define it in a class: set on the object it is not looked for"
        if callable(value)
        else "the trainer has an attribute of this name; give the method another one"
        for member, value in vars(trainer).items()
        if isinstance(getattr(cls, member, None), FunctionType)
    }
    _check_all(name, "has methods that nothing would call", wrong)
    theirs = {hook for hook in uses if not _is_ours(next(base for base in cls.__mro__ if hook in vars(base)))}
    unused = {hook: uses[hook][1] for hook in theirs if not uses[hook][0] and not getattr(getattr(cls, hook), OWN, False)}
    _check_all(name, "overrides what nothing would call", unused)


def _check_all(name: str, what: str, problems: Mapping[str, str]) -> None:
    if lines := [f"{member}: {problem}" for member, problem in sorted(problems.items()) if problem]:
        raise UsageError(f"{name} {what}:\n  " + "\n  ".join(lines))


def _members(cls: type) -> dict[str, Any]:
    """Returns what the user's classes define beside plain values, by name, the definition that counts first."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if _is_ours(base) or _is_installed(base):
            continue
        for name, value in vars(base).items():
            if not (name.startswith("__") and name.endswith("__")):
                found.setdefault(name, value)
    return found


# ---------------------------------------------------------------------- what is never called


def _never_called(cls: type, theirs: Mapping[str, Any], ours: Mapping[str, Any], elsewhere: Mapping[str, str]) -> dict[str, str]:
    """Returns what is wrong with each method that nothing would call, by name."""
    hidden = {name for name in theirs if name in ours and _owner(cls, name) not in theirs_of(cls)}
    # A class of a library below ours, such as Thread, calls its own methods.
    free = {name for base in cls.__mro__ if _is_installed(base) and base is not object for name in vars(base)}
    hooks = [name for name in ours if not name.startswith("_")]
    problems = {
        name: f"the class that defines it comes after {_owner(cls, name).__name__} in the bases: put it before" for name in hidden
    }
    for name in theirs.keys() - ours.keys() - free:
        if not any(getattr(function, OWN, False) for function in _functions(theirs[name])):
            problems[name] = _remedy(name, theirs[name], hooks, elsewhere)
    return problems


def _shown_only(ours: Any) -> str:
    """Returns what to override in place of one of our members; empty if it may be overridden."""
    getters = [function for function in _functions(ours) if hasattr(function, SHOWS)] if ours is not None else []
    return f"nothing reads it: override `{getattr(getters[0], SHOWS)}`" if getters else ""


def theirs_of(cls: type) -> set[type]:
    return {base for base in cls.__mro__ if not _is_ours(base)}


def _owner(cls: type, name: str) -> type:
    """Returns the class whose definition of a name counts."""
    return next(base for base in cls.__mro__ if name in vars(base))


def _remedy(name: str, value: Any, hooks: list[str], elsewhere: Mapping[str, str]) -> str:
    """Returns what to do instead of defining this member; empty if it is a helper."""
    if not _is_method(value):
        return ""
    if name in elsewhere:
        return f"{elsewhere[name]} {OTHERWISE}"
    private = name.startswith("_")
    known = [other for other in (*hooks, *elsewhere) if other.startswith("_") == private]
    near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR_OF_HELPER if private else NEAR)
    if not near:
        return ""
    also = f" {near[0]}: {elsewhere[near[0]]}" if near[0] in elsewhere else ""
    return f"it is no hook; did you mean {near[0]}?{also} {OTHERWISE}"


def _functions(value: Any) -> Iterator[Any]:
    """Yields the Python functions that a member of a class is made of."""
    parts = [getattr(value, name, None) for name in ("fget", "fset", "fdel", "func", "__func__", "__wrapped__")]
    if isinstance(value, FunctionType):
        yield value
    for part in parts:
        if part is not None:
            yield from _functions(part)


# ---------------------------------------------------------------------- whether an override can be called


def _mismatch(name: str, theirs: Any, ours: Any) -> str:
    """Returns why what overrides `ours` cannot be used in its place; empty if it can."""
    private = "; it is a private part of the trainer: give a helper another name" if name.startswith("_") else ""
    if isinstance(ours, PROPERTIES):
        wrong = isinstance(theirs, FunctionType | staticmethod | classmethod)
        return f"it is a property: write @property or @functools.cached_property above it{private}" if wrong else ""
    if not isinstance(ours, FunctionType | classmethod | staticmethod):
        return f"the trainer has an attribute of this name{private}" if _is_method(theirs) else ""
    if isinstance(theirs, PROPERTIES) or not _is_method(theirs):
        return f"it is {type(theirs).__name__}, and must be a method: def {name}{_shown(ours)}{private}"
    if any(inspect.iscoroutinefunction(function) for function in _functions(theirs)):
        return f"it is a coroutine, and must be a plain method: def {name}{_shown(ours)}{private}"
    problem = _signature_problem(name, theirs, ours)
    return problem and f"{problem}; expected def {name}{_shown(ours)}{private}"


def _shown(function: Any) -> str:
    """Returns the parameters of a method, without their types."""
    plain = getattr(function, "__func__", function)
    empty = inspect.Parameter.empty
    signature = inspect.signature(plain)
    parameters = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=empty))


def _signature_problem(name: str, theirs: Any, ours: Any) -> str:
    try:
        taken, given = _parameters(theirs), _parameters(ours)
    except (TypeError, ValueError):  # of a function that is not written in Python
        return ""
    positional = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    num_passed = CALLED_WITH.get(name, sum(p.default is p.empty for p in positional))
    keywords = [p.name for p in given if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    try:
        inspect.Signature(taken).bind(*[None] * num_passed, **dict.fromkeys(keywords))
    except TypeError as error:
        return (
            f"it cannot be called with {', '.join([p.name for p in positional[:num_passed]] + keywords) or 'nothing'} ({error})"
        )
    except ValueError:  # the parameters without `self` make no signature
        return ""
    return _order_problem([p.name for p in positional], taken) or _unheard(keywords, positional, taken, given)


def _order_problem(names: list[str], taken: list[inspect.Parameter]) -> str:
    """Returns which parameter has the place of another one: they are passed by their places."""
    for place, parameter in enumerate(taken[: len(names)]):
        if parameter.name in names and parameter.name != names[place] and parameter.kind is not parameter.KEYWORD_ONLY:
            return f"{parameter.name} has the place of {names[place]}"
    return ""


def _unheard(
    keywords: list[str], positional: list[inspect.Parameter], taken: list[inspect.Parameter], given: list[inspect.Parameter]
) -> str:
    """Returns which parameter of an event would never get a value: events alone take any keywords, and are called by us alone."""
    if not any(p.kind is p.VAR_KEYWORD for p in given):
        return ""
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = [p.name for p in taken[len(positional) :] if p.kind not in variable and not p.name.startswith("_")]
    unheard = [name for name in named if name not in keywords]
    return f"{', '.join(unheard)}: no such keyword{did_you_mean(unheard[0], keywords)}" if unheard else ""


def _parameters(method: Any) -> list[inspect.Parameter]:
    """Returns the parameters of a method, without its object or class."""
    plain = getattr(method, "__func__", method)
    parameters = list(inspect.signature(plain).parameters.values())
    if isinstance(method, staticmethod) or (parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL):
        return parameters
    return parameters[1:]


# ---------------------------------------------------------------------- whose code it is


def _is_method(value: Any) -> bool:
    return (callable(value) and not isinstance(value, type)) or isinstance(value, METHODS)


def _is_ours(base: type) -> bool:
    return base.__module__.partition(".")[0] == PACKAGE


def _is_installed(base: type) -> bool:
    """Whether a class is of a library, and not of the user. A class that inherits from ours is checked wherever it is."""
    if any(_is_ours(parent) for parent in base.__mro__):
        return False
    module = sys.modules.get(base.__module__)
    return base.__module__ == "builtins" or (module is not None and _is_library(module))


@functools.cache
def _library_folders() -> tuple[str, ...]:
    return tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def _is_library(module: ModuleType) -> bool:
    if module.__name__.partition(".")[0] in (PACKAGE, *sys.stdlib_module_names) and module.__name__ != "__main__":
        return True
    path = getattr(module, "__file__", None)
    return isinstance(path, str) and path.startswith(_library_folders())
