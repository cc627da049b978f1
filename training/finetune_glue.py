r"""Finetune an encoder on a task of GLUE, or on your own texts and labels.

    python training/finetune_glue.py --model_name_or_path MODEL --task_name sst2 --output_dir outputs/sst2
    python training/finetune_glue.py training/recipes/finetune_glue/paper.yaml --model_name_or_path MODEL OTHER_MODEL \
        --task_name sst2 --output_dir outputs/sweep
    python training/finetune_glue.py --model_name_or_path MODEL --train_file a.csv --validation_file b.csv \
        --output_dir outputs/own

After Ctrl-C or a kill, the same command continues from the last checkpoint (the end of an epoch).
"""

from common import extra  # noqa: F401

# isort: split
import sys

from tasks.classification import GlueArguments, TextClassification
from tasks.runs import Command

COMMAND = Command("finetune_glue", __doc__, TextClassification, GlueArguments)
main, parse = COMMAND.main, COMMAND.parse

if __name__ == "__main__":
    sys.exit(main())
