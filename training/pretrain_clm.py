"""Pretrain a causal language model from a recipe, into a folder that is ready for the Hub.

    python training/pretrain_clm.py training/recipes/pretrain_clm/demo.yaml
    python training/pretrain_clm.py training/recipes/pretrain_clm/demo.yaml --data texts/ --output-dir outputs/mine
    accelerate launch --config_file training/accelerate/multi_gpu.yaml training/pretrain_clm.py RECIPE.yaml

`--key value` overrides a key of the recipe, `--model.key value` a key of its model section. If a run is interrupted,
the same command resumes it from its last checkpoint. Needs the `train` extra: pip install -e ".[train]"
"""

from common import extra  # noqa: F401

# isort: split
import sys

from engine.run import Command
from objectives.causal import CausalPretraining, CausalRecipe

COMMAND = Command("pretrain_clm", __doc__, CausalRecipe, CausalPretraining)
read_recipe, main = COMMAND.read_recipe, COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
