"""ListOps: nested operations on lists of digits, generated to the specification of Long Range Arena.

An expression is a tree: `[MAX 2 9 [MIN 4 7 ] 0 ]` has the value 9. A node below the depth limit is an operator with
probability 1/4 and a digit otherwise; an operator has 2 to 10 arguments. MED is the median, rounded down, and SM the
sum modulo 10. Expressions of 501 to 1,999 tokens are kept. An operator with its opening bracket is one token, and so
is the closing bracket; the round brackets of the published text form are no tokens.

The published generator sets no seed, and its validation file contains its test file. Here every expression follows from
the seed, and no two of all splits are equal.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

OPERATORS = ("MIN", "MAX", "MED", "SM")
DIGITS = 10
# Ids: 0 is padding, then the digits, the operators with their opening brackets, and the closing bracket.
WORDS = ("", *map(str, range(DIGITS)), *(f"[{operator}" for operator in OPERATORS), "]")
FIRST_DIGIT = 1
FIRST_OPERATOR = FIRST_DIGIT + DIGITS
CLOSE = FIRST_OPERATOR + len(OPERATORS)
VOCAB_SIZE = CLOSE + 1
_TREES = 1000  # grown at a time; the expressions of a seed depend on it


@dataclass(frozen=True)
class ListOps:
    """The published parameters.

    Args:
        max_depth: levels of a tree; the last one has digits only.
        max_arguments: an operator has from two to so many.
        operator_probability: of a node above the last level.
        min_length: expressions have more tokens.
        max_length: expressions have fewer tokens.
    """

    max_depth: int = 10
    max_arguments: int = 10
    operator_probability: float = 0.25
    min_length: int = 500
    max_length: int = 2000

    def draw(self, generator: np.random.Generator) -> Iterator[tuple[np.ndarray, int]]:
        """Draw expressions without end: token ids int16 [length], and the value."""
        while True:
            yield from _expressions(_grow(self, generator))


def text(ids: np.ndarray) -> str:
    """The words of token ids, separated by spaces."""
    return " ".join(WORDS[token] for token in ids)


class _Level(NamedTuple):
    """The nodes of one level of many trees, in order; the children of a node lie together on the next level.

    Attributes:
        tree: the number of the tree that a node belongs to.
        arguments: number of children, 0 for a digit.
        kind: the digit, or the number of the operator.
    """

    tree: np.ndarray
    arguments: np.ndarray
    kind: np.ndarray


def _grow(spec: ListOps, generator: np.random.Generator) -> list[_Level]:
    """Grow trees level by level, and return those of the allowed lengths."""
    levels, tree, lengths = [], np.arange(_TREES), np.zeros(_TREES, np.int64)
    for depth in range(1, spec.max_depth + 1):
        # A root that is a digit is never long enough.
        share = spec.operator_probability if depth > 1 else 1
        is_operator = (generator.random(len(tree)) < share) & (depth < spec.max_depth)
        arguments = np.where(is_operator, generator.integers(2, spec.max_arguments + 1, len(tree)), 0)
        kind = np.where(is_operator, generator.integers(len(OPERATORS), size=len(tree)), 0)
        kind = np.where(is_operator, kind, generator.integers(DIGITS, size=len(tree)))
        levels.append(_Level(tree, arguments, kind))
        lengths += np.bincount(tree, 1 + is_operator, _TREES).astype(np.int64)
        tree = np.repeat(tree, arguments)
        tree = tree[lengths[tree] < spec.max_length]  # a tree that is too long need not grow on
    kept = (lengths > spec.min_length) & (lengths < spec.max_length)
    return [_Level(*(column[kept[level.tree]] for column in level)) for level in levels]


def _expressions(levels: list[_Level]) -> Iterator[tuple[np.ndarray, int]]:
    """The token ids and values of the trees."""
    values, sizes = _evaluate(levels)
    ends = np.cumsum(sizes[0])
    tokens = np.empty(sizes[0].sum(), np.int16)
    begin = ends - sizes[0]
    for depth, (level, size) in enumerate(zip(levels, sizes, strict=True)):
        is_operator = level.arguments > 0
        tokens[begin] = level.kind + np.where(is_operator, FIRST_OPERATOR, FIRST_DIGIT)
        tokens[(begin + size - 1)[is_operator]] = CLOSE
        if is_operator.any():
            arguments, below = level.arguments[is_operator], sizes[depth + 1]
            before = np.cumsum(below) - below  # tokens of all nodes to the left on the level
            first = before[np.cumsum(arguments) - arguments]
            begin = before + np.repeat(begin[is_operator] + 1 - first, arguments)
        else:
            begin = begin[:0]
    for expression, value in zip(np.split(tokens, ends[:-1]), values, strict=True):
        yield expression, int(value)


def _evaluate(levels: list[_Level]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The values of the roots, and the numbers of tokens of all nodes, level by level."""
    values, sizes = np.empty(0, np.int64), [np.empty(0, np.int64)]
    for level in reversed(levels):
        is_operator = level.arguments > 0
        arguments, own, size = level.arguments[is_operator], level.kind.copy(), np.ones_like(level.kind)
        if len(arguments):
            own[is_operator] = _apply(level.kind[is_operator], arguments, values)
            size[is_operator] = 2 + np.add.reduceat(sizes[0], np.cumsum(arguments) - arguments)
        values, sizes = own, [size, *sizes]
    return values, sizes[:-1]


def _apply(operators: np.ndarray, arguments: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The results of operators; `values` are those of their arguments, one operator's after the other's."""
    starts = np.cumsum(arguments) - arguments
    ordered = values[np.lexsort((values, np.repeat(np.arange(len(arguments)), arguments)))]
    low, high = ordered[starts + (arguments - 1) // 2], ordered[starts + arguments // 2]
    results = ordered[starts], ordered[starts + arguments - 1], (low + high) // 2, np.add.reduceat(values, starts) % 10
    return np.choose(operators, results)
