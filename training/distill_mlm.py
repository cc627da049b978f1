"""Distillation: train a converted model further on masked text, while it imitates the model it was made from.

    python training/distill_mlm.py training/recipes/distill_mlm/tiny.yaml
    python training/distill_mlm.py RECIPE.yaml --teacher FOLDER --model_name_or_path FOLDER --output_dir FOLDER

The loss is a weighted sum of the masked-LM loss, the divergence of the model's distribution from the teacher's at the
masked positions, and the relative squared error of its hidden states at all layers. Checkpoints and results are those
of `pretrain_mlm.py`; four more keys name the teacher and the weights.
"""

from common import extra  # noqa: F401

# isort: split
import sys

from engine.command import Command
from objectives.distill import DistillObjective, DistillRecipe

COMMAND = Command("distill_mlm", __doc__, DistillRecipe, DistillObjective)
read_recipe, pretrain, main = COMMAND.read_recipe, COMMAND.pretrain, COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
