"""Convert a trained encoder and train the result to compute what its source computes, from one recipe.

    python training/convert.py training/recipes/convert/tiny.yaml
    python training/convert.py RECIPE.yaml --teacher FOLDER --data texts/ --output_dir outputs/mine
    accelerate launch --config_file training/accelerate/multi_gpu.yaml training/convert.py RECIPE.yaml

The source (BERT, RoBERTa, XLM-R, DistilBERT, ELECTRA or a sentence-transformers folder of one) is the teacher. `model`
chooses the family and its fields, `stages` what is trained, on which lengths, with which loss. After an interruption
the same command resumes from the last checkpoint. `python -m luna_hf convert` converts without training.
"""

from common import extra  # noqa: F401

# isort: split
import sys

from converting.recipe import ConvertRecipe
from converting.run import Conversion
from engine.run import Command

COMMAND = Command("convert", __doc__, ConvertRecipe, Conversion)
read_recipe, main = COMMAND.read_recipe, COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
