"""Turn a trained encoder (RoBERTa, XLM-R, BERT, DistilBERT, ELECTRA, ...) into an ABC model, for further training.

    python conversion/roberta_to_abc.py FacebookAI/roberta-base outputs/abc-base-start --max-length 4096

The weights of the encoder and of a masked-LM head are kept; another head, such as a classifier's, is listed as unused.
Only the memory control is new, and the convolution, if you add one, which starts at zero.
"""

import sys

from from_roberta import Conversion

_conversion = Conversion("abc_memory", __doc__, {"share_control": "--control-per-layer"})
parse, main = _conversion.parse, _conversion.main

if __name__ == "__main__":
    sys.exit(main())
