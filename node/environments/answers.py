"""Answers that must not reach a reasoning_gym scorer as they are, because that scorer evaluates them as Python.

reasoning_gym 0.1.25 hands the answer to `eval` in four datasets and to sympy's parser, which evaluates too, in
five more (docs/environments.md lists them). Where `eval` only serves to give part credit for a Python literal, the
answer is compared instead and nothing is parsed. Where a formula is the answer, its syntax tree is checked against
a list of what a formula may contain before sympy sees it.
"""

import ast
from collections.abc import Callable, Collection, Mapping
from typing import Any

MAX_FORMULA_CHARACTERS = 400
MAX_NUMBER = 10**12
MAX_EXPONENT = 64

COMPARED: Mapping[str, Callable[[Mapping[str, Any]], Collection[str]]] = {
    "binary_matrix": lambda entry: [entry["answer"]],
    "spiral_matrix": lambda entry: [entry["answer"].strip()],
    "string_insertion": lambda entry: [entry["answer"]],
    "n_queens": lambda entry: entry["metadata"]["valid_answers"],
}
"""Datasets whose scorer evaluates the answer for part credit only: all answers that score 1."""

_ELEMENTARY = frozenset(
    ("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "sqrt")
)
"""Functions of one argument that integrals are made of."""

FORMULAS: Mapping[str, Callable[[Mapping[str, Any]], frozenset[str]]] = {
    "countdown": lambda entry: frozenset(),
    "puzzle24": lambda entry: frozenset(),
    "polynomial_multiplication": lambda entry: frozenset("abcdefghijklmnopqrstuvwxyz"),
    "simple_integration": lambda entry: frozenset([entry["metadata"]["variable"], "C"]),
    "intermediate_integration": lambda entry: _ELEMENTARY | {entry["metadata"]["variable"], "C", "E", "pi"},
}
"""Datasets whose scorer parses a formula with sympy: the names a formula may contain."""


def is_safe_formula(text: str, names: Collection[str]) -> bool:
    """Whether `text` is arithmetic over small numbers and `names`, cheap to evaluate and free of anything else."""
    if len(text) > MAX_FORMULA_CHARACTERS or not text.isascii():
        return False
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return _is_safe(tree.body, names)


def _is_safe(node: ast.expr, names: Collection[str]) -> bool:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return abs(value) <= MAX_NUMBER
        case ast.Name(id=name):
            return name in names
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _is_safe(operand, names)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return _is_safe(left, names) and _is_safe(right, names)
        case ast.BinOp(left=left, op=ast.Pow(), right=right) if names:
            return _is_safe(left, names) and _is_safe(right, names) and _is_small_power(left, right)
        case ast.Call(func=ast.Name(id=function), args=[argument], keywords=[]):
            return function in names and function in _ELEMENTARY and _is_safe(argument, names)
    return False


def _is_small_power(base: ast.expr, exponent: ast.expr) -> bool:
    """No tower of powers, and no large constant in the exponent: 9**9**9 must not be worked out."""
    parts = [*ast.walk(base), *ast.walk(exponent)]
    if any(isinstance(part, ast.Pow) for part in parts) or any(
        isinstance(part, ast.Mult) for part in ast.walk(exponent)
    ):
        return False
    numbers = [part.value for part in ast.walk(exponent) if isinstance(part, ast.Constant)]
    return all(isinstance(number, int | float) and number <= MAX_EXPONENT for number in numbers)
