"""Nothing in the tests reaches for the network: a name that is on no disk fails at once, and not after retries."""

import os

# Before any library reads it. Processes that talk to the stand-in for the Hub set it back (hub_stub.py).
os.environ["HF_HUB_OFFLINE"] = "1"
