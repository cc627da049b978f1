"""Train an encoder-decoder to translate, from a recipe, into a folder that is ready for the Hub.

    python training/train_translation.py training/recipes/train_translation/multi30k_luna16.yaml --data FOLDER
    accelerate launch --config_file training/accelerate/multi_gpu.yaml training/train_translation.py RECIPE.yaml

`--key value` overrides a key of the recipe, `--model.key value` a key of its model section. If a run is interrupted,
the same command resumes it from its last checkpoint. Afterwards the mean of the last checkpoints translates the
validation and the test split with beam search; BLEU and chrF are sacreBLEU's. Needs the `train` and `translate` extras:
pip install -e ".[train,translate]"
"""

from common import extra, extra_translate  # noqa: F401

# isort: split
import sys

from engine.run import Command
from translation.recipe import TranslationRecipe
from translation.run import Translation

COMMAND = Command("train_translation", __doc__, TranslationRecipe, Translation)
read_recipe, main = COMMAND.read_recipe, COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
