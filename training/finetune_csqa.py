r"""Finetune an encoder on CommonsenseQA (Talmor et al. 2019): five choices per question, without a passage.

    python training/finetune_csqa.py training/recipes/finetune_csqa/paper.yaml \
        --model_name_or_path MODEL [MODEL ...] --dataset_name FOLDER --output_dir outputs/csqa

A choice is encoded as

    <s> Q: question </s> A: option </s>

with one separator and not the two of RoBERTa's pairs, as RoBERTa's authors did it (fairseq,
`examples/roberta/commonsense_qa`); by tokenizers with BERT's layout as `[CLS] Q: question [SEP] A: option [SEP]`, all
in segment 0. The column `question_concept`, from which annotators wrote the question, is not used.

Question and option together are cut to `--max_question_length` tokens (default: 128, or what the model or
`--max_length` takes if that is less): the question gives way, and an option only if it exceeds all of them. The data
set's test split has no answers: the model's are written to `predictions/test.jsonl`, in the form of the leaderboard.
"""

from common import extra  # noqa: F401

# isort: split
import sys

from tasks.multiple_choice import ChoiceTrainingArguments, CsqaArguments, CsqaTask
from tasks.runs import Command

COMMAND = Command("finetune_csqa", __doc__, CsqaTask, CsqaArguments, ChoiceTrainingArguments)
main, parse = COMMAND.main, COMMAND.parse

if __name__ == "__main__":
    sys.exit(main())
