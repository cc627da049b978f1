"""How far a simultaneous translation lags behind its source.

`delays` are g(1) to g(n), the number of source tokens that had been read when each target token was written. There is
at least one. Whoever counts the tokens decides whether the end token is one of them: see `scores.evaluate_wait`.
"""

from collections.abc import Callable, Sequence
from statistics import fmean

import torch

from luna_hf.simultaneous import Policy


def average_lagging(delays: Sequence[float], source: int, target: int | None = None) -> float:
    """AL, in source tokens (Ma et al. 2019, equation 8): the mean of g(t) - (t - 1) |x| / |y|.

    It is over the tokens up to the first one that is written after the whole source x has been read, or all if none is.
    In the paper, |y| is the length of the translation; SimulEval takes that of the reference: pass it as `target`.

    Args:
        delays: of each target token.
        source: number of source tokens.
        target: |y|, the number of target tokens that an ideal translator spreads over the source; by default as many
            as were written.

    Raises:
        ValueError: There is no delay, or no source token.
    """
    _check(delays, source)
    last = next((place for place, delay in enumerate(delays, 1) if delay >= source), len(delays))
    rate = (target or len(delays)) / source
    return fmean(delay - place / rate for place, delay in enumerate(delays[:last]))


def length_adaptive_average_lagging(delays: Sequence[float], source: int, reference: int) -> float:
    """LAAL (Papi et al. 2022): AL whose |y| is the longer of translation and reference, so neither length lowers it.

    AL by the reference's length (SimulEval) falls if a translation has too many tokens, and AL by the translation's
    falls if it has too few. `reference` is the number of the reference's tokens.

    Raises:
        ValueError: There is no delay, or no source token.
    """
    return average_lagging(delays, source, max(len(delays), reference))


def differentiable_average_lagging(delays: Sequence[float], source: int) -> float:
    """DAL (Cherry and Foster 2019): every token takes its share of time, also after the source has ended.

    Raises:
        ValueError: There is no delay, or no source token.
    """
    _check(delays, source)
    rate, before, lags = len(delays) / source, None, []
    for place, delay in enumerate(delays):
        before = delay if before is None else max(delay, before + 1 / rate)
        lags.append(before - place / rate)
    return fmean(lags)


def _check(delays: Sequence[float], source: int) -> None:
    if not delays or source < 1:
        raise ValueError(
            f"A latency needs at least 1 target token and 1 source token, but there are {len(delays)} and {source}: "
            "leave out empty texts."
        )


def mean_latencies(
    policy: Policy, sources: Sequence[int], targets: Sequence[int], references: Sequence[int]
) -> dict[str, float]:
    """AL, LAAL and DAL of a policy, means over pairs with so many tokens of source, translation and reference."""
    measures: dict[str, Callable[..., float]] = {
        "average_lagging": lambda delays, source, reference: average_lagging(delays, source),
        "length_adaptive_average_lagging": length_adaptive_average_lagging,
        "differentiable_average_lagging": lambda delays, source, reference: differentiable_average_lagging(
            delays, source
        ),
    }
    rows = [
        (policy.visible(torch.tensor([source]), target)[0].tolist(), source, reference)
        for source, target, reference in zip(sources, targets, references, strict=True)
    ]
    return {name: fmean(measure(*row) for row in rows) for name, measure in measures.items()}
