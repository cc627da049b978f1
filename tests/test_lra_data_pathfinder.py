"""Pathfinder images follow the published parameters, and their labels can be read from the pixels."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from lra.pathfinder import Grower, Paddle, Pathfinder, Scene
from reference.pathfinder import find_discs, trace
from scipy import stats

SPEC = Pathfinder()
UNLIKELY = 1e-3  # of a statistic under the published distribution; seeds are fixed


def strokes(snake, length):
    """The paddles of a path as (y, x) of both ends, the one that comes first on the path before the other."""
    ends = []
    for index, (y, x, direction) in enumerate(snake):
        pair = (y, x), (y + length * math.sin(direction), x + length * math.cos(direction))
        ends.append(pair if index == 0 else pair[::-1])
    return ends


@pytest.fixture(scope="module")
def scenes():
    generator = np.random.default_rng(0)
    return [SPEC.scene(generator) for _ in range(200)]


def paths(scene):
    return [*scene.contours, *scene.distractors]


def points(ends, count=9):
    """Points along a paddle, [count, 2]."""
    return np.linspace(*ends, count)


def gap(first, second):
    """The distance between two paddles."""
    return np.linalg.norm(points(first)[:, None] - points(second)[None], axis=-1).min()


def test_parameters_are_the_published_ones():
    published = (32, 2, 0.5, 1, 1, 14, 4, 5, 1.0, 7, 1.5, 0.75, 2.0, 2)
    assert tuple(SPEC.__dict__[name] for name in SPEC.__dataclass_fields__) == published


def test_a_tracer_of_pixels_finds_the_labels(scenes):
    for scene in scenes[:50]:
        image = SPEC.render(scene)
        assert sorted(find_discs(image, SPEC)) == sorted(scene.discs)
        assert trace(image, SPEC) == scene.label


def test_paths_have_the_published_lengths(scenes):
    for scene in scenes:
        assert [len(snake) for snake in scene.contours] == [SPEC.contour_length] * 2
        assert len(scene.distractors) <= SPEC.distractors
        assert all(len(snake) == SPEC.distractor_length for snake in scene.distractors)
    assert np.mean([len(scene.distractors) for scene in scenes]) > 2  # most find room


def test_the_paddles_of_a_path_follow_each_other(scenes):
    for scene in scenes:
        for snake in paths(scene):
            dashes = strokes(snake, SPEC.paddle_length)
            assert np.allclose([math.dist(*ends) for ends in dashes], SPEC.paddle_length)
            for (_, head), (tail, _) in itertools.pairwise(dashes):
                # Twice the margin, less in a bend; pivots are whole pixels.
                assert 0.5 < math.dist(head, tail) < 2 * SPEC.margin + 1


def test_no_other_paddles_touch(scenes):
    for scene in scenes[:10]:
        dashes = [
            (path, index, ends)
            for path, snake in enumerate(paths(scene))
            for index, ends in enumerate(strokes(snake, SPEC.paddle_length))
        ]
        for (path, index, ends), (other_path, other_index, other) in itertools.combinations(dashes, 2):
            if path != other_path or abs(index - other_index) > 1:
                assert gap(ends, other) > SPEC.margin + SPEC.paddle_thickness / 2


def test_paddles_keep_to_the_padding(scenes):
    ends = [point for scene in scenes for snake in paths(scene) for dash in strokes(snake, 2) for point in dash]
    assert np.min(ends) >= SPEC.padding
    assert np.max(ends) <= SPEC.size - 1 - SPEC.padding
    assert np.min(ends) < 3 and np.max(ends) > SPEC.size - 4  # and use the room


def test_contours_begin_in_the_middle_and_apart(scenes):
    for scene in scenes:
        first, second = ((snake[0].y, snake[0].x) for snake in scene.contours)
        assert all(2 * SPEC.seed_distance <= place < SPEC.size - 2 * SPEC.seed_distance for place in first)
        assert abs(math.dist(first, second) - SPEC.seed_distance) < 1


def test_discs_mark_a_beginning_and_an_end(scenes):
    for scene in scenes:
        begins, ends = ([(snake[place].y, snake[place].x) for snake in scene.contours] for place in (0, -1))
        first, last = begins.index(scene.discs[0]), ends.index(scene.discs[1])
        assert scene.label == (first == last)


def test_labels_and_marked_contours_are_balanced(scenes):
    for marked in ([scene.label for scene in scenes], [in_first(scene) for scene in scenes]):
        assert stats.binomtest(sum(marked), len(marked)).pvalue > UNLIKELY


def in_first(scene):
    seed = scene.contours[0][0]
    return scene.discs[0] == (seed.y, seed.x)


@pytest.mark.parametrize("continuity", [1.0, 1.8])
def test_turns_are_drawn_with_the_published_weights(continuity):
    spec = Pathfinder(size=200, seed_distance=40, contour_length=2, distractors=0, continuity=continuity)
    grower, generator = Grower(spec), np.random.default_rng(1)
    tip = grower._tip(Paddle(100, 100, 0.0))
    drawn = Counter()
    for _ in range(4000):
        paddle, _ = grower._grow(tip, 0, generator.random)
        drawn[paddle.y - 100, paddle.x - 103] += 1  # from the pivot: 1 before the tail, and 4 on
    span = range(-4, 5)
    ring = [(dy, dx) for dy in span for dx in span if round(math.hypot(dy, dx)) == 3]
    weights = [max(math.cos(min(abs(math.atan2(*step)) * continuity, math.pi / 2)), 0) ** 2 for step in ring]
    possible = [(step, weight / sum(weights)) for step, weight in zip(ring, weights, strict=True) if weight > 1e-9]
    assert drawn.keys() <= {step for step, _ in possible}
    expected = [4000 * weight for _, weight in possible]
    assert stats.chisquare([drawn[step] for step, _ in possible], expected).pvalue > UNLIKELY


def test_brightness():
    """Contours have 3/4 of the distractors' contrast; discs are brighter than a dash of a contour."""
    low, high = [Paddle(8, 8, 0.0)], [Paddle(24, 8, 0.0)]
    image = SPEC.render(Scene((low, low), [high], ((8, 24), (24, 24)), 1)).astype(float)
    assert image.max() == 255 and image.min() == 0
    assert image[8, 9] / image[24, 9] == pytest.approx(SPEC.paddle_contrast, abs=1 / 255)
    assert image[8, 24] > 1.1 * image[8, 9]
    assert image[8, 8:11].min() > 80 > image[8, 12:22].max()  # a dash of two pixels' length
    assert image[7, 9] < image[8, 9] / 2  # and of less than a pixel's width


def test_images_follow_from_the_seed():
    def first(seed):
        rows = SPEC.draw(np.random.default_rng(seed))
        return [next(rows)[0] for _ in range(3)]

    assert np.array_equal(first(3), first(3))
    assert not np.array_equal(first(3), first(4))
    assert first(3)[0].shape == (1024,) and first(3)[0].dtype == np.uint8
