"""Take the screenshot of docs/try.md: all tabs of the page, after a run of each.

    python tests/space_screenshot.py [CHECKPOINTS]

It needs Chromium (`apt-get install chromium`) and writes docs/images/space.png.
"""

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from space_browser import BUTTONS, CHROMIUM, opened, run_tab

from luna_hf.scripting import Parser, UserError, run_script

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples" / "space"))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", metavar="CHECKPOINTS", type=Path, nargs="?", default=ROOT / "checkpoints")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "space.png", help="the picture")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Write the picture. Returns the exit status."""
    return run_script(lambda: take(parse(sys.argv[1:] if words is None else words)))


def take(options: argparse.Namespace) -> None:
    """Write the picture.

    Raises:
        UserError: Chromium or a causal model is missing, or there is nothing to show.
    """
    if CHROMIUM is None:
        raise UserError("Chromium is not installed. Install it: apt-get install chromium")
    shots = []
    with opened(options.checkpoints) as page:
        if not page.get_by_role("tab", name="Generate").count():
            raise UserError(f"{options.checkpoints} holds no causal Luna, so a tab would be missing. Add one.")
        for tab in BUTTONS:
            run_tab(page, tab)
            page.wait_for_timeout(500)  # bars and pictures fade in
            shots.append(Image.open(io.BytesIO(page.screenshot(full_page=True))))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    side_by_side(shots).save(options.output, optimize=True)
    print(f"Written to {options.output}")


def side_by_side(shots: list[Image.Image]) -> Image.Image:
    """Put pictures in two columns, with a grey gap."""
    gap, width = 16, shots[0].width
    heights = [max(shot.height for shot in shots[row : row + 2]) for row in range(0, len(shots), 2)]
    sheet = Image.new("RGB", (2 * width + gap, sum(heights) + gap * (len(heights) - 1)), "lightgrey")
    for place, shot in enumerate(shots):
        sheet.paste(shot, (place % 2 * (width + gap), sum(heights[: place // 2]) + place // 2 * gap))
    return sheet


if __name__ == "__main__":
    sys.exit(main())
