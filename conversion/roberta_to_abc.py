"""Turn a trained RoBERTa (or XLM-R, CamemBERT, data2vec-text, BERT) into an ABC model, to be trained on.

    python conversion/roberta_to_abc.py FacebookAI/roberta-base outputs/abc-base-start --max-length 4096

Every weight is kept; only the memory control is new, and the convolution if one is asked for, which starts as zero.
"""

import sys

from from_roberta import AbcConversion, main

if __name__ == "__main__":
    sys.exit(main(AbcConversion(), __doc__))
