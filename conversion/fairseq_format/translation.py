"""The authors' translation checkpoints: arguments, configuration, model, dictionaries, and the comparison of both."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from luna_hf import LunaConfig, LunaForConditionalGeneration
from luna_hf.scripting import UserError

from .checkpoint import Original, plain_norm
from .config import ACTIVATIONS, BOS, EOS, PAD, SPECIALS, UNK
from .reference import EPSILON
from .translation_names import OUTPUT, to_ours
from .translation_reference import count, translate
from .verification import EXACT, Comparison, Mismatch, Report, random_ids

_SOURCE, _TARGET = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
# Pairs of arguments that our models have one field for.
_EQUAL = (
    *("embed_dim", "ffn_embed_dim", "attention_heads", "projected_attention_heads", "learned_pos", "normalize_before"),
)


def make_config(original: Original) -> LunaConfig:
    """Our configuration of a translation checkpoint.

    Raises:
        UserError: It has parts or options that our models lack.
    """
    weights, options = original.weights, original.options
    for name in _EQUAL:
        pair = [getattr(options, f"{part}_{name}") for part in ("encoder", "decoder")]
        if pair[0] != pair[1]:
            raise UserError(f"`encoder_{name}` is {pair[0]!r}, but `decoder_{name}` {pair[1]!r}: they must be equal.")
    if options.no_token_positional_embeddings:
        raise UserError("`no_token_positional_embeddings` is true, but our models need positions.")
    if options.activation_fn not in ACTIVATIONS:
        raise UserError(f"`activation_fn` is {options.activation_fn!r}. Choose one of {', '.join(ACTIVATIONS)}.")
    learned = ("encoder", "decoder") if options.encoder_learned_pos else ()
    tables = [weights[f"{part}.embed_positions.weight"] for part in learned]
    if len({len(table) for table in tables}) > 1:
        raise UserError("Source and target have different numbers of learned positions, which our models cannot have.")
    source, target, output = (weights.get(name) for name in (_SOURCE, _TARGET, OUTPUT))
    shared = source.shape == target.shape and torch.equal(source, target)
    try:
        return LunaConfig(
            is_encoder_decoder=True,
            vocab_size=len(source),
            decoder_vocab_size=len(target),
            share_encoder_decoder_embeddings=shared,
            tie_word_embeddings=output is None or (output.shape == target.shape and torch.equal(output, target)),
            hidden_size=source.shape[1],
            num_hidden_layers=count(original, "encoder."),
            decoder_layers=count(original, "decoder."),
            num_attention_heads=options.encoder_attention_heads,
            num_projected_attention_heads=options.encoder_projected_attention_heads or None,
            intermediate_size=len(weights["encoder.layers.0.fc1.weight"]),
            hidden_act=ACTIVATIONS[options.activation_fn],
            hidden_dropout_prob=options.dropout,
            attention_probs_dropout_prob=options.attention_dropout,
            activation_dropout=options.activation_dropout,
            max_position_embeddings=len(tables[0]) - PAD - 1 if tables else options.max_source_positions,
            position_embedding_type="learned" if options.encoder_learned_pos else "sinusoidal",
            scale_embedding=not options.no_scale_embedding,
            embedding_layer_norm="encoder.layernorm_embedding.weight" in weights,
            norm_first=options.encoder_normalize_before,
            layer_norm_eps=EPSILON,
            projection_length=len(weights["encoder.projected_embeddings"]),
            dynamic_projection=not options.fix_projection_length,
            tie_kv="encoder.layers.0.self_attn.c_proj.weight" in weights,
            pack_activation=options.pack_activation,
            bos_token_id=BOS,
            pad_token_id=PAD,
            eos_token_id=EOS,
            decoder_start_token_id=EOS,
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def make_model(original: Original) -> tuple[LunaForConditionalGeneration, list[str]]:
    """Our model with the checkpoint's weights in float32 or wider, and the names of unused tensors.

    Raises:
        UserError: The tensors do not make a complete model.
    """
    plain = {name: plain_norm(name, tensor, original.norm_offset) for name, tensor in original.weights.items()}
    state, unused = to_ours(plain)
    model = LunaForConditionalGeneration(make_config(original))
    shapes, given = ({name: tensor.shape for name, tensor in part.items()} for part in (model.state_dict(), state))
    names = (shapes.keys() | given.keys()) - model.all_tied_weights_keys.keys()
    wrong = [name for name in names if shapes.get(name) != given.get(name)]
    if wrong:
        raise UserError(
            f"{original.name} is damaged or not of the authors' code: under our names, {', '.join(sorted(wrong)[:3])} "
            "are missing, unknown or of the wrong shape."
        )
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=False)
    model.tie_weights()
    return model.eval(), unused


def read_symbols(path: Path) -> list[str]:
    """Symbols of a translation dictionary by their ids: `<s>`, `<pad>`, `</s>`, `<unk>`, then the lines.

    Raises:
        UserError: The file cannot be read, or is no dictionary.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The dictionary {path} cannot be read ({error}).") from error
    symbols = dict.fromkeys(SPECIALS)
    for number, line in enumerate(lines, start=1):
        symbol, _, occurrences = line.rpartition(" ")
        if not line:
            continue
        if not symbol or not occurrences.isdigit() or symbol in symbols:
            raise UserError(f"{path}, line {number}: {line!r} is not a new symbol and a count, separated by a space.")
        symbols[symbol] = None
    return [*symbols]


def make_tokenizer(symbols: list[str], longest: int) -> PreTrainedTokenizerFast:
    """A tokenizer of text that is already split as in the training run (Moses and BPE, for example).

    It looks words up and ends each text with `</s>`; decoding joins `@@ `, the mark of subword-nmt.
    """
    backend = Tokenizer(WordLevel({symbol: place for place, symbol in enumerate(symbols)}, unk_token=SPECIALS[UNK]))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    # Each symbol gets a space, unless it goes on.
    steps = [decoders.Replace(Regex(r"(?<!@@)\z"), " "), decoders.Replace(Regex(r"@@\z"), ""), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 0, 1)])
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=longest, **names)


@torch.no_grad()
def compare(folder: Path, original: Original) -> Report:
    """Compare a converted model with the checkpoint, in float64 from the stored tensors, layer by layer.

    Raises:
        UserError: The model cannot be loaded, or a tensor is missing.
    """
    model = LunaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    slots, longest = model.config.projection_length, model.config.max_position_embeddings
    lengths = sorted({min(n, longest) for n in (1, max(1, slots // 2), slots + 9)})
    sources = random_ids(len(original.weights[_SOURCE]), lengths)
    targets = random_ids(len(original.weights[_TARGET]), lengths[::-1])
    theirs = [translate(original, *pair) for pair in zip(sources, targets, strict=True)]
    inputs = f"{len(lengths)} pairs of {', '.join(map(str, lengths))} source tokens"
    report = None
    for dtype in (torch.float32, torch.float64):
        comparison = Comparison()
        try:
            _add_rows(comparison, model.to(dtype), sources, targets, theirs)
        except Mismatch as error:
            return Report([], [str(error)])
        if report is not None:
            return report.with_exact(comparison.rows())
        report = Report(comparison.rows(), inputs=inputs, precision=f"float32 and float64 (limit {EXACT:.0e})")
        if report.ok:
            return report
    return report


def _add_rows(
    comparison: Comparison,
    model: LunaForConditionalGeneration,
    sources: list[Tensor],
    targets: list[Tensor],
    theirs: list[dict[str, Tensor]],
) -> None:
    source, target = (torch.nn.utils.rnn.pad_sequence(rows, True, PAD) for rows in (sources, targets))
    encoded = model.get_encoder()(source, output_hidden_states=True, output_packed_hidden_states=True)
    given = {"encoder_outputs": encoded, "attention_mask": source != PAD, "decoder_input_ids": target}
    outputs = model(**given, use_cache=False, output_hidden_states=True)
    packed = [*encoded.packed_hidden_states[:-1], encoded.packed_last_hidden_state]
    for b, expected in enumerate(theirs):
        n, m = len(sources[b]), len(targets[b])
        for i, (states, slots) in enumerate(zip(encoded.hidden_states, packed, strict=True)):
            comparison.add(f"encoder {i}", "tokens", states[b, :n], expected[f"encoder.{i}.x"])
            px = expected[f"encoder.{i}.px"]
            comparison.add(f"encoder {i}", "packed", slots[b, : len(px)], px)
        for i, states in enumerate(outputs.decoder_hidden_states):
            comparison.add(f"decoder {i}", "tokens", states[b, :m], expected[f"decoder.{i}.x"])
        comparison.add("logits", "", outputs.logits[b, :m], expected["logits"])
