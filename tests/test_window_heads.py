"""On a CPU, inference attends the windows of a few heads at a time: the numbers are those of all heads at once."""

import pytest
import torch

from luna_hf import AbcConfig, AbcModel


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("control", ["sliding_window", "dilated"])
def test_heads_in_parts_give_the_same(control, implementation):
    sizes = {"vocab_size": 60, "hidden_size": 40, "num_hidden_layers": 1, "intermediate_size": 40}
    fields = {"memory_control": control, "memory_size": 4, "attn_implementation": implementation}
    torch.manual_seed(0)
    # Five heads: the last part is a smaller one.
    model = AbcModel(AbcConfig(**sizes, **fields, num_attention_heads=5, max_position_embeddings=32)).double().eval()
    ids = torch.randint(4, 60, (3, 13))
    ids[0, 6:], ids[1, :2] = 1, 1
    asked = {"output_attentions": implementation == "eager"}
    whole = model(ids, **asked)
    with torch.no_grad():
        parts = model(ids, **asked)
    real = ids != 1
    torch.testing.assert_close(parts.last_hidden_state[real], whole.last_hidden_state.detach()[real])
    if implementation == "eager":
        torch.testing.assert_close(parts.attentions[0], whole.attentions[0].detach())
