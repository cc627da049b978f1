"""Publish a checkpoint on the Hub: `make publish NAME=lavo-mini-en REPO=USER/lavo-mini-en`.

    python model_cards/publish.py NAME REPO

The repository gets what checkpoints/NAME holds, with the card for its name and, for a model of luna_hf, the code that
loads it without the package. Log in first: `hf auth login`.
"""

import training_path  # noqa: F401

# isort: split
import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from build import Card
from catalogue import Zoo
from common.hub import push_folder, reserve_repository
from huggingface_hub import get_token
from ship import save

from luna_hf.scripting import Parser, UserError, reason, run_script, write_text


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="folder in checkpoints/")
    parser.add_argument("repository", metavar="REPO", help="USER/NAME on the Hub; created if there is none")
    return parser.parse_args(words)


def publish(zoo: Zoo, name: str, repository: str) -> None:
    """Upload a checkpoint.

    Raises:
        UserError: An unknown name, a repository of another form, no login, or a failed upload.
    """
    folder = zoo.checkpoint(name).folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise UserError(f"REPO is {repository!r}, but must have the form USER/NAME, such as USER/{name}.")
    if get_token() is None:
        raise UserError("You are not logged in to the Hub. Run: hf auth login")
    card = Card(zoo, name, repository).text()
    repository = reserve_repository(repository)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / name
        shutil.copytree(folder, copy)
        save(folder, copy, f"{repository.partition('/')[0]}/{zoo.entry(name).base}")
        write_text(copy / "README.md", card)
        try:
            push_folder(copy, repository, f"Publish {name}")
        except UserError as error:
            why = reason(error.__cause__ or error)
            raise UserError(f"The upload to {repository} failed ({why}). Run the same command again.") from error
    print(f"Published {name} as {repository}.")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""

    def script() -> None:
        options = parse(sys.argv[1:] if words is None else words)
        publish(Zoo(), options.name, options.repository)

    return run_script(script, stopped="the repository may be incomplete; run the same command again")


if __name__ == "__main__":
    sys.exit(main())
