"""Take the screenshots of docs/try.md: the first tab of the page, and the others, after a run of each.

    python tests/space_screenshot.py [CHECKPOINTS]

It needs Chromium (`apt-get install chromium`) and writes space.png and space-tabs.png in docs/images.
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
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images", help="the folder of the pictures")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Write the pictures. Returns the exit status."""
    return run_script(lambda: take(parse(sys.argv[1:] if words is None else words)))


def take(options: argparse.Namespace) -> None:
    """Write the pictures.

    Raises:
        UserError: Chromium, or a model for one of the tabs, is missing.
    """
    if CHROMIUM is None:
        raise UserError("Chromium is not installed. Install it: apt-get install chromium")
    shots = []
    with opened(options.checkpoints) as page:
        if missing := [tab for tab in BUTTONS if not page.get_by_role("tab", name=tab).count()]:
            raise UserError(f"{options.checkpoints} has no model for {' and '.join(missing)}. Add one.")
        for tab in BUTTONS:
            run_tab(page, tab)
            page.wait_for_timeout(500)  # bars and pictures fade in
            shots.append(Image.open(io.BytesIO(page.screenshot(full_page=True))))
    options.output.mkdir(parents=True, exist_ok=True)
    for name, picture in {"space.png": shots[0], "space-tabs.png": side_by_side(shots[1:])}.items():
        picture.convert("RGB").quantize(256).save(options.output / name, optimize=True)
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
