"""Pathfinder answered from the pixels: find the discs, and follow the dashes from one to the other."""

import math

import numpy as np

EDGE = 8


def padded(image):
    """The image with a border that says nothing, since it is as bright as can be."""
    return np.pad(image.astype(float), EDGE, constant_values=255)


def window(padded, y, x, picture):
    """What a padded image shows where a picture would lie."""
    reach = len(picture) // 2
    return padded[y + EDGE - reach : y + EDGE + reach + 1, x + EDGE - reach : x + EDGE + reach + 1]


def find_discs(image, spec):
    """The (y, x) of the two places that are brightest throughout a disc."""
    core, wide, places = spec.disc > 0.9, padded(image), range(2, spec.size - 2)
    darkest = {(y, x): window(wide, y, x, core)[core].min() for y in places for x in places}
    return sorted(darkest, key=darkest.get)[-2:]


def trace(image, spec):
    """Whether a chain of as many paddles as a contour has leads from one disc to the other.

    A paddle may lie wherever the image is as bright as its picture; the brightness of contours follows from the discs'.
    """
    discs, wide = find_discs(image, spec), padded(image)
    contrast = min(image[disc] for disc in discs) * spec.paddle_contrast * spec.snake_contrast
    step, span = spec.paddle_length + spec.margin, range(-4, 5)
    ring = [(dy, dx) for dy in span for dx in span if abs(math.hypot(dy, dx) - step) < 0.5]

    def shows(y, x, direction):
        picture = contrast * spec.stroke(direction)
        return 0 <= y < spec.size and 0 <= x < spec.size and (window(wide, y, x, picture) >= picture - 2).all()

    def moved(y, x, direction, distance):
        return round(y + distance * math.sin(direction)), round(x + distance * math.cos(direction))

    def leads(pivot, direction, paddles, target):
        y, x = moved(*pivot, direction, step + spec.margin)
        for dy, dx in ring:
            forward, head = math.atan2(dy, dx), (y + dy, x + dx)
            turn = abs(math.remainder(forward - direction, math.tau))
            if turn < math.pi / 2 and shows(*head, math.atan2(-dy, -dx)):
                if paddles == 1 and head == target:
                    return True
                if paddles > 1 and leads((y, x), forward, paddles - 1, target):
                    return True
        return False

    for begin, end in (discs, discs[::-1]):
        directions = [math.radians(degrees) for degrees in range(-180, 180)]
        for direction in (direction for direction in directions if shows(*begin, direction)):
            if leads(moved(*begin, direction, -spec.margin), direction, spec.contour_length - 1, end):
                return True
    return False
