r"""Finetune an encoder on RACE (Lai et al. 2017): English examinations, four choices per question, two levels.

    python training/finetune_race.py training/recipes/finetune_race/paper.yaml \
        --model_name_or_path MODEL [MODEL ...] --dataset_name FOLDER --output_dir outputs/race

A choice is encoded as

    <s> question with option </s></s> passage </s>

or, by tokenizers with BERT's layout, as `[CLS] question with option [SEP] passage [SEP]`. The option fills every blank
(`_`) of the question, or follows it if there is none, as RoBERTa's authors did it (fairseq,
`examples/roberta/preprocess_RACE.py`); consecutive underscores are one blank here. The papers do not specify the order
of the parts: this one is that of fairseq's `sentence_ranking` task, with which RoBERTa was finetuned on RACE and on
which the code of Luna's authors is built.

Question with option are cut to `--max_question_length` tokens, then the passage so that both fit into `--max_length`
(default: 512, or what the model takes if that is less). The default of `--max_question_length` is 128, but at most half
of what the special tokens leave of an input: 62 for a model of 128 positions with RoBERTa's tokenizer. `--dataset_name`
is `ehovy/race` or a folder with the subfolders `middle` and `high`; `--dataset_config` chooses one level.
"""

from common import extra  # noqa: F401

# isort: split
import sys

from tasks.multiple_choice import ChoiceTrainingArguments, RaceArguments, RaceTask
from tasks.runs import Command

COMMAND = Command("finetune_race", __doc__, RaceTask, RaceArguments, ChoiceTrainingArguments)
main, parse = COMMAND.main, COMMAND.parse

if __name__ == "__main__":
    sys.exit(main())
