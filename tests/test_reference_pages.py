"""docs/reference names everything public, and its directives name what exists; test_docs.py checks that it is fresh."""

import importlib
import re
from dataclasses import fields

import pytest
import reference_tables
from helpers import ROOT
from transformers import PreTrainedConfig

import luna_hf
from luna_hf import FAMILIES

PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md")}
DIRECTIVES = [name for text in PAGES.values() for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)]


def find(name):
    """What a name with dots stands for."""
    for place in reversed([match.start() for match in re.finditer(r"\.", name)]):
        try:
            found = importlib.import_module(name[:place])
        except ModuleNotFoundError:
            continue
        for part in name[place + 1 :].split("."):
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def test_directives_name_what_exists_and_say_so_once():
    assert len(DIRECTIVES) > 60 and len(DIRECTIVES) == len({*DIRECTIVES})
    for name in DIRECTIVES:
        assert find(name) is not None


def test_everything_public_has_an_entry():
    """Also each class of every family, which `__all__` must name for tools that do not run the package."""
    families = FAMILIES.values()
    names = {name for family in families for name in (family.config.__name__, *family.modeling.__all__)}
    assert names < {*luna_hf.__all__}
    assert {f"luna_hf.{name}" for name in luna_hf.__all__} <= {*DIRECTIVES}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_is_in_a_table(model_type):
    own, library = ({field.name for field in fields(one)} for one in (FAMILIES[model_type].config, PreTrainedConfig))
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGES["configuration.md"], re.MULTILINE))
    assert own - library <= rows, own - library - rows


def test_every_command_is_listed():
    for path in reference_tables.scripts((*reference_tables.FOLDERS, *reference_tables.MEASURING)):
        assert f"`{path.relative_to(ROOT).as_posix()}`" in PAGES["commands.md"], path


def test_every_row_says_what_it_means():
    for name, text in PAGES.items():
        assert not re.findall(r"^.*\|  \|$", text, re.MULTILINE), name
