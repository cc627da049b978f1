"""Attention transfer: fit the attention of a converted model to that of the model it was made from.

    python conversion/roberta_to_abc.py FacebookAI/roberta-base outputs/abc-base-start --memory-control mlp
    python training/transfer_attention.py training/recipes/transfer_attention/abc-base.yaml
    python training/pretrain_mlm.py training/recipes/pretrain_mlm/abc-base-continue.yaml

Every layer of the student reads the token states that the teacher has at that layer, on plain masked text, and learns
to add what the teacher's attention adds to them. So every layer has exact targets, independent of the other layers.
Recipes, checkpoints and results are those of `pretrain_mlm.py`; one more key names the teacher.
"""

from common import extra  # noqa: F401

# isort: split
import sys

from engine.command import Command
from objectives.transfer import TransferObjective, TransferRecipe

COMMAND = Command("transfer_attention", __doc__, TransferRecipe, TransferObjective)
read_recipe, pretrain, main = COMMAND.read_recipe, COMMAND.pretrain, COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
