"""Start a page in the browser to try the models in a folder of checkpoints.

    python examples/space/app.py [CHECKPOINTS]

Every subfolder of CHECKPOINTS with a sentence encoder, a masked language model, a classifier (whole, or a PEFT adapter)
or a causal Luna is used. The default is `checkpoints` beside this file, as in a Hugging Face Space, or in the root of
the repository.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from loading import load_checkpoints

from luna_hf.scripting import Parser, UserError, run_script

HERE = Path(__file__).resolve().parent


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", metavar="CHECKPOINTS", type=Path, nargs="?", default=default_folder())
    parser.add_argument("--port", type=int, help="port of the page (default: the first free one from 7860)")
    return parser.parse_args(words)


def default_folder() -> Path:
    """`checkpoints` of a Space, else of the clone."""
    beside = HERE / "checkpoints"
    return beside if beside.is_dir() else HERE.parents[1] / "checkpoints"


def main(words: Sequence[str] | None = None) -> int:
    """Serve the page until Ctrl-C. Returns the exit status."""
    return run_script(lambda: serve(parse(sys.argv[1:] if words is None else words)), stopped="the page is closed")


def serve(options: argparse.Namespace) -> None:
    """Load the models and serve the page.

    Raises:
        UserError: Packages, checkpoints or the port are missing.
    """
    if missing := [name for name in ("gradio", "matplotlib", "peft") if find_spec(name) is None]:
        raise UserError(f'{" and ".join(missing)} not installed. Install the demo extra: pip install -e ".[demo]"')
    checkpoints = load_checkpoints(options.checkpoints)
    from page import THEME, build

    try:
        build(checkpoints).launch(server_port=options.port, theme=THEME)
    except OSError as error:
        raise UserError(f"The page cannot be served: {error}. Choose another port with --port.") from error


if __name__ == "__main__":
    sys.exit(main())
