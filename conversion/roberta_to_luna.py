"""Turn a trained encoder (RoBERTa, XLM-R, BERT, DistilBERT, ELECTRA, ...) into a Luna model, for further training.

    python conversion/roberta_to_luna.py FacebookAI/roberta-base outputs/luna-base-start --projection-length 128

The weights of the encoder and of a masked-LM head are kept; another head, such as a classifier's, is listed as unused.
The packed sequence starts as embeddings of text tokens. The pack attention reads with the source's queries and keys and
passes the token states on unchanged.
"""

import sys

from from_roberta import Conversion

_conversion = Conversion("luna", __doc__)
parse, main = _conversion.parse, _conversion.main

if __name__ == "__main__":
    sys.exit(main())
