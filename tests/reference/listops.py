"""ListOps by the letter: an evaluator of the written form, and the generator as a recursion."""

from collections.abc import Iterator
from random import Random
from statistics import median


def evaluate(words: str) -> int:
    """The value of an expression such as `[MAX 2 9 [MIN 4 7 ] 0 ]`."""
    open_lists = [[]]
    for word in words.split():
        if word.startswith("["):
            open_lists.append([word[1:]])
        elif word == "]":
            name, *arguments = open_lists.pop()
            open_lists[-1].append(
                {
                    "MIN": lambda numbers: min(numbers),
                    "MAX": lambda numbers: max(numbers),
                    "MED": lambda numbers: int(median(numbers)),
                    "SM": lambda numbers: sum(numbers) % 10,
                }[name](arguments)
            )
        else:
            open_lists[-1].append(int(word))
    ((value,),) = open_lists
    return value


def arguments(words: str) -> list[int]:
    """The number of arguments of every operator."""
    found, open_lists = [], [0]
    for word in words.split():
        if word == "]":
            found.append(open_lists.pop())
            continue
        open_lists[-1] += 1
        if word.startswith("["):
            open_lists.append(0)
    return found


def depth(words: str) -> int:
    """Levels of the tree; a digit alone has one."""
    level = deepest = 1
    for word in words.split():
        level += word.startswith("[")
        deepest = max(deepest, level)
        level -= word == "]"
    return deepest


def grow(random: Random, spec, level: int = 1) -> list[str]:
    """The words of a random tree."""
    if level == spec.max_depth or random.random() > spec.operator_probability:
        return [str(random.randrange(10))]
    words = ["[" + random.choice(["MIN", "MAX", "MED", "SM"])]
    for _ in range(random.randint(2, spec.max_arguments)):
        words += grow(random, spec, level + 1)
    return [*words, "]"]


def expressions(random: Random, spec) -> Iterator[str]:
    """Random expressions of the allowed lengths, without end."""
    while True:
        words = grow(random, spec)
        if spec.min_length < len(words) < spec.max_length:
            yield " ".join(words)
