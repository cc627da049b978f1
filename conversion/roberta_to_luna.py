"""Turn a trained RoBERTa (or XLM-R, CamemBERT, data2vec-text, BERT) into a Luna model, to be trained on.

    python conversion/roberta_to_luna.py FacebookAI/roberta-base outputs/luna-base-start --projection-length 128

Every weight is kept. The packed sequence is made from embeddings of text tokens; the pack attention reads with the
source's queries and keys and hands on the token states as they are.
"""

import sys

from from_roberta import LunaConversion, main

if __name__ == "__main__":
    sys.exit(main(LunaConversion(), __doc__))
