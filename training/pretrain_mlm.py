"""Pretrain a masked language model from a recipe, into a folder that is ready for the Hub.

    python training/pretrain_mlm.py training/recipes/pretrain_mlm/demo.yaml
    python training/pretrain_mlm.py training/recipes/pretrain_mlm/demo.yaml --data texts/ --output-dir outputs/mine
    accelerate launch --config_file training/accelerate/multi_gpu.yaml training/pretrain_mlm.py RECIPE.yaml

`--key value` overrides a key of the recipe, `--model.key value` a key of its model section. If a run is interrupted,
the same command resumes it from its last checkpoint. Needs the `train` extra: pip install -e ".[train]"
"""

from common import extra  # noqa: F401

# isort: split
import sys

from engine.run import Command
from objectives.masked import MaskedPretraining, PretrainRecipe

COMMAND = Command("pretrain_mlm", __doc__, PretrainRecipe, MaskedPretraining)
read_recipe, main = COMMAND.read_recipe, COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
