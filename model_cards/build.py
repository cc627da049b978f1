"""Write the cards of the checkpoints, `README.md`, with the scores that the Hub reads in their headers, and the code;
and the table of all checkpoints.

    python model_cards/build.py [NAME ...]
    python model_cards/build.py --check

Without a NAME, every checkpoint is written. Prose comes from model_cards/zoo.yaml, and every figure from the files of
the checkpoint and from experiments/results/mini-*.json; the code is today's `src/luna_hf`. `--check` writes nothing,
and fails if a card is stale.
"""

import training_path  # noqa: F401

# isort: split
import argparse
import importlib
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import adapters
import index
from catalogue import Zoo, named
from common import cards
from common.machine import plural
from common.models import longest_input
from engine.card import PLOT
from golden import KINDS
from huggingface_hub import EvalResult
from ship import renew_code
from tasks.metrics import TITLES
from transformers import AutoConfig

from luna_hf import FAMILIES
from luna_hf.markdown import Markdown, bullets, code, code_block, table
from luna_hf.scripting import Parser, UserError, refuse_links, run_script, write_text

Row = dict[str, Any]
# What a card calls the figures of a language model: key in metrics.json, format, and the kinds that show it.
FIGURES = {
    "loss (nats)": ("loss", ".3f", ("masked LM", "causal LM")),
    "perplexity": ("perplexity", ".1f", ("causal LM",)),
    "accuracy": ("accuracy", ".1%", ("masked LM", "causal LM")),
}
# How each kind of model is used: its imports, the call that loads it, and what follows.
USAGE = {
    "masked LM": (
        "from transformers import pipeline",
        'fill_mask = pipeline("fill-mask", {model})',
        "fill_mask({text})",
    ),
    "causal LM": (
        "from transformers import pipeline",
        'generate = pipeline("text-generation", {model})',
        "generate({text}, max_new_tokens=20)",
    ),
    "classification": (
        "from transformers import pipeline",
        'classify = pipeline("text-classification", {model})',
        "classify({text})",
    ),
    "multiple choice": (
        "import torch\nfrom transformers import AutoModelForMultipleChoice, AutoTokenizer",
        "tokenizer = AutoTokenizer.from_pretrained({model})\n"
        "model = AutoModelForMultipleChoice.from_pretrained({model})",
        "{example}\nwith torch.no_grad():\n"
        "    logits = model(**{{key: value.unsqueeze(0) for key, value in inputs.items()}}).logits[0]\n"
        "print(options[logits.argmax()])",
    ),
    "tokens": (
        "from transformers import pipeline",
        'tag = pipeline("token-classification", {model}, aggregation_strategy="first")',
        "tag({text})",
    ),
    "answers": (
        "import torch\nfrom transformers import AutoModelForQuestionAnswering, AutoTokenizer",
        "tokenizer = AutoTokenizer.from_pretrained({model})\n"
        "model = AutoModelForQuestionAnswering.from_pretrained({model})",
        'inputs = tokenizer("Where is Mary?", "Mary is in London.", return_tensors="pt")\n'
        "with torch.no_grad():\n"
        "    outputs = model(**inputs)\n"
        "first, last = outputs.start_logits.argmax(), outputs.end_logits.argmax()\n"
        'print(tokenizer.decode(inputs["input_ids"][0, first : last + 1]))',
    ),
    "sentences": (
        "from sentence_transformers import SentenceTransformer",
        "model = SentenceTransformer({model})",
        'embeddings = model.encode([{text}, "Another sentence."])\nmodel.similarity(embeddings, embeddings)',
    ),
}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*", help="checkpoint; by default all")
    parser.add_argument("--check", action="store_true", help="fail if a card is stale")
    return parser.parse_args(words)


def is_stale(zoo: Zoo, name: str) -> bool:
    """Whether the card of a checkpoint differs from what it should be."""
    path = zoo.checkpoint(name).folder / "README.md"
    return not path.is_file() or path.read_text(encoding="utf-8") != Card(zoo, name).text()


def write(zoo: Zoo, name: str) -> None:
    """Write a card, and the code that loads the model without the package."""
    refuse_links(zoo.checkpoint(name).folder)
    renew_code(zoo.checkpoint(name).folder)
    write_text(zoo.checkpoint(name).folder / "README.md", Card(zoo, name).text())


class Card:
    """The card of one checkpoint.

    Args:
        zoo: the checkpoints.
        name: of the checkpoint.
        repository: `USER/NAME` on the Hub, for the card that is shown there.

    Raises:
        UserError: An unknown name.
    """

    def __init__(self, zoo: Zoo, name: str, repository: str = "") -> None:
        self.zoo, self.name, self.repository = zoo, name, repository
        self.checkpoint, self.entry = zoo.checkpoint(name), zoo.entry(name)
        self.metrics, self.kind = self.checkpoint.metrics, self.checkpoint.golden["kind"]
        self.model_type = self.checkpoint.config["model_type"]
        self.custom, self.is_adapter = self.model_type in FAMILIES, adapters.is_adapter(self.checkpoint.folder)
        self.shown = {
            name: (key, format_)
            for name, (key, format_, kinds) in FIGURES.items()
            if self.kind in kinds and f"held_out_{key}" in self.metrics
        }

        self.own_scores = [
            (split, metric, value)
            for split, part in self.metrics.get("scores", {}).items()
            for metric, value in part.items()
        ]

    def text(self) -> str:
        """The content of README.md."""
        return cards.fill_card(
            "checkpoint.md",
            metadata=self.metadata(),
            name=self.name,
            summary=Markdown(self.entry.summary.strip()),
            facts=self.facts(),
            usage=code_block(self.usage(), "python"),
            usage_note=self.usage_note(),
            results=Markdown(self.results()),
            scores=Markdown("minilm_finetune.json" if "minilm" in self.name else "mini-*.json"),
            rounding=f"{self.checkpoint.golden['rounding']:.2g}",
            plot=Markdown(f"![Training]({PLOT})\n\n" if (self.checkpoint.folder / PLOT).is_file() else ""),
            limits=bullets(map(Markdown, self.entry.limits)),
            data=Markdown(self.data()),
            cost=self.cost(),
            machine=f"Machine: {self.metrics['hardware']}. Versions: {self.metrics['versions']}.",
            repeat=code_block(self.repeat(), "sh"),
        )

    def facts(self) -> str:
        """What it is, in numbers."""
        form = "stored in bfloat16, loaded in float32"
        count = f"{self.metrics['parameters']:,} parameters"
        if self.is_adapter:
            text = f"A PEFT adapter with its head, {count} ({form}), for `{self.base_model()}`, of type"
            return f"{text} `{self.model_type}`; trained on inputs of at most {self.metrics['longest']:,} tokens."
        return f"Type `{self.model_type}`, {count} ({form}), inputs of {self.longest()}."

    def longest(self) -> str:
        """The longest input in words."""
        longest = longest_input(AutoConfig.from_pretrained(self.checkpoint.folder, trust_remote_code=False))
        return "any length" if math.isinf(longest) else f"at most {longest:,} tokens"

    # ---- the header ----

    def metadata(self) -> Markdown:
        """The YAML header."""
        task = KINDS[self.kind].pipeline
        held_out = {"dataset_type": "text", "dataset_name": "held-out text of the training corpus"}
        results = [
            EvalResult(task, metric_type=key, metric_name=name, metric_value=value, **held_out)
            for name, (key, _) in self.shown.items()
            for value in [round(self.metrics[f"held_out_{key}"], 4)]
        ]
        for row, value in self.published():
            more = {"dataset_config": row.get("config"), "dataset_split": row["split"]}
            results.append(EvalResult(row["type"], row["dataset"], row["task"], row["metric"], round(value, 4), **more))
        library = "sentence-transformers" if self.kind == "sentences" else "peft" if self.is_adapter else "transformers"
        return cards.metadata(
            name=self.name,
            model_type=self.model_type,
            base_model=self.base_model(),
            tags=[self.model_type, KINDS[self.kind].tag],
            results=results,
            library=library,
            language=self.entry.language,
            license=self.entry.license,
            pipeline_tag=task,
            datasets=self.entry.datasets,
            metrics=list(dict.fromkeys(result.metric_type for result in results if result.metric_type != "loss")),
        )

    def base_model(self) -> str:
        """The base by its name on the Hub, beside this repository if it is one of ours."""
        if self.entry.base not in self.zoo.entries or not self.repository:
            return self.entry.base
        return f"{self.repository.partition('/')[0]}/{self.entry.base}"

    def published(self) -> list[tuple[Row, float]]:
        """The scores of this model on data of the Hub: its own for a finetuned model, else means over the seeds."""
        if not self.entry.task:
            rows = [{"type": "text-classification", **row} for row in self.zoo.rows if row["model"] == self.name]
            return [(row, statistics.mean(row["values"])) for row in rows if "dataset" in row]
        dataset = (self.entry.datasets or [self.entry.task])[0]
        shared = {"task": self.entry.task, "dataset": dataset, "type": KINDS[self.kind].pipeline}
        return [({**shared, "split": split, "metric": metric}, value) for split, metric, value in self.own_scores]

    # ---- use ----

    def usage(self) -> str:
        """Python that works where the card is shown: in a clone, or on the Hub."""
        imports, load, use = USAGE[self.kind]
        text, *second = self.entry.example or self.checkpoint.golden["cases"][0]["texts"][:1]
        text = json.dumps({"text": text, "text_pair": second[0]} if second else text, ensure_ascii=False)
        example = ""
        if self.kind == "multiple choice":
            command = (
                f"finetune_{self.metrics['task']}" if self.is_adapter else Path(self.checkpoint.stages[-1].script).stem
            )
            example = importlib.import_module(command).COMMAND.make_task.example
        if self.custom and not self.repository:
            imports = f"import luna_hf  # registers the model type\n{imports}"
        loaded = load.format(model=self._model(self.repository))
        return f"{imports}\n\n{loaded}\n{use.format(text=text, example=example)}"

    def usage_note(self) -> str:
        """How to load it from elsewhere."""
        if self.repository:
            return "With the package `luna_hf` imported, `trust_remote_code` is not needed." if self.custom else ""
        load = USAGE[self.kind][1].format(model=self._model(f"USER/{self.name}")).replace("\n", "`, `")
        needed = ["needs `peft`"] if self.is_adapter else []
        needed += ["does not need luna_hf"] if self.custom else []
        without = f" This {' but '.join(needed)}." if needed else ""
        return f"The path is the one in a clone of luna_hf. From the Hub: `{load}`.{without}"

    def _model(self, repository: str) -> str:
        trust = ", trust_remote_code=True" if self.custom else ""
        return f'"{repository}"{trust}' if repository else f'"checkpoints/{self.name}"'

    # ---- results ----

    def results(self) -> str:
        """The tables of figures."""
        parts = [self._held_out(), self._cosines(), self._own_scores(), self._scores(), self._samples()]
        return "\n\n".join(part for part in parts if part)

    def _held_out(self) -> str:
        """Loss and accuracy beside the twin's, if that was measured on the same tokens, and the unigram baseline's."""
        if not self.shown:
            return ""
        own, lines = self.metrics, [["this model", self._cells(self.metrics)]]
        twin = self.zoo.figures(self.entry.twin)
        rounded = {"rel_tol": 1e-4}  # as the results of a twin that is not shipped
        if all(math.isclose(twin.get(key, 0), own[key], **rounded) for key in ("held_out_targets", "unigram_loss")):
            lines.append([f"`{self.entry.twin}`", self._cells(twin)])
        unigram = {f"held_out_{key}": own[f"unigram_{key}"] for key in ("loss", "accuracy")}
        unigram["held_out_perplexity"] = math.exp(own["unigram_loss"])
        lines.append(["unigram baseline", self._cells(unigram)])
        targets = "masked tokens" if self.kind == "masked LM" else "tokens"
        header = [f"on the same {own['held_out_targets']:,} held-out {targets}", *self.shown]
        return table(header, ([name, *cells] for name, cells in lines))

    def _cells(self, metrics: dict[str, Any]) -> list[str]:
        return [format(metrics[f"held_out_{key}"], format_) for key, format_ in self.shown.values()]

    def _cosines(self) -> str:
        """How close a converted model is to its source, before and after its training."""
        if not (after := self.metrics.get("cosine", {})):
            return ""
        logs = (row for stage in self.checkpoint.stages for row in stage.log if "cosine" in row and row["step"] == 0)
        before = next(logs, {}).get("cosine", {})
        lines = []
        for length, value in after.items():
            lines.append([f"{int(length):,}", f"{before[length]:.4f}" if length in before else "", f"{value:.4f}"])
        found = table(["tokens", "mean cosine to the source, before training", "after training"], lines)
        if recipe := self.checkpoint.stages[-1].recipe:
            sizes = ", ".join(map(str, recipe["teacher_windows"]))
            found += (
                f"\n\nHeld-out texts. Up to {recipe['teacher_longest']} tokens, the source reads a text as it is; for "
                f"longer texts, the reference is the mean of its windows of {sizes} tokens."
            )
        return found

    def _own_scores(self) -> str:
        """The scores of this very run."""
        lines = [[split, TITLES.get(metric, metric), f"{value:.4f}"] for split, metric, value in self.own_scores]
        return table(["split", "metric", "this checkpoint"], lines) if lines else ""

    def _scores(self) -> str:
        """Scores over the seeds of finetuning: of this model (or its base), the twin and the baselines."""
        model = self.metrics.get("contender", self.entry.base) if self.entry.task else self.name
        rows = self.zoo.rows_with(model)
        scores = {(row["model"], row["task"], row["metric"], row["split"]): row["values"] for row in rows}
        own = [key for name, *key in scores if name == model and self.entry.task in ("", key[0])]
        if not own:
            return ""
        baselines = [row["model"] for row in rows if row.get("baseline")]
        models = [
            name
            for name in dict.fromkeys([model, self.entry.base if self.entry.task else "", self.entry.twin, *baselines])
            if any((name, *key) in scores for key in own)
        ]
        titles = {row["task"]: row.get("title", row["task"]) for row in rows}
        most = max(len(scores.get((name, *key), [])) for name in models for key in own)
        lines = []
        for task, metric, split in own:
            values = (scores.get((name, task, metric, split), []) for name in models)
            lines.append([titles[task], TITLES.get(metric, metric), *(_spread(each, most) for each in values)])
        found = table(["finetuned on", "metric", *(f"`{name}`" for name in models)], lines)
        has_fewer = any("(" in cell for line in lines for cell in line[2:])
        fewer = ", or over the number in brackets" if has_fewer else ""
        found += f"\n\nMean and standard deviation over {plural(most, 'seed')} of finetuning{fewer}."
        if "teacher" in models:
            found += " The teacher is the source of the conversion, finetuned alike on 512 tokens or on windows."
        return found

    def _samples(self) -> str:
        """The most probable tokens at a mask, or a continuation, as `golden.json` has them."""
        case = self.checkpoint.golden["cases"][0]
        if self.kind == "masked LM":
            pairs = zip(case["answers"][0], case["values"][0], strict=True)
            guesses = Markdown(", ".join(f"{code(token)} {math.exp(value):.0%}" for token, value in pairs))
            return table(["sentence", "answers"], [[code(case["texts"][0]), guesses]])
        if self.kind == "causal LM":
            answer = code("".join(case["answers"][0]))
            return table(["prompt", "greedy continuation"], [[code(case["texts"][0]), answer]])
        return ""

    # ---- data, cost and repetition ----

    def data(self) -> str:
        """What the model was trained on."""
        found, own = [self.zoo.data(self.entry)], self.metrics
        if own.get("training_tokens"):
            found.append(
                f"{own['training_tokens']:,} tokens in {own['training_documents']:,} documents to train on, "
                f"{own['held_out_documents']:,} documents held out, a vocabulary of {own['vocabulary']:,} tokens."
            )
        if own.get("train_rows"):
            found.append(bullets([f"{own['train_rows']:,} rows to train on.", *own.get("notes", [])]))
        return "\n\n".join(found)

    def cost(self) -> str:
        """What training cost, by stage and in all; sums of what every stage has recorded."""
        stages = self.checkpoint.stages
        figures = [(stage.steps, stage.tokens, stage.metrics["training_seconds"]) for stage in stages]
        names = [(str(number), f"`{Path(stage.script).name}`") for number, stage in enumerate(stages, 1)]
        if len(stages) > 1:
            names.append(("all", ""))
            figures.append(tuple(None if None in column else sum(column) for column in zip(*figures, strict=True)))
        cells = [["" if value is None else f"{value:,.0f}" for value in row] for row in figures]
        lines = [[*name, *row] for name, row in zip(names, cells, strict=True)]
        return table(["stage", "command", "steps", "tokens", "seconds of training"], lines)

    def repeat(self) -> str:
        """The commands that train and ship the model again."""
        folder, commands = f"checkpoints/{self.name}", []
        if self.is_adapter:
            task, seed = self.metrics["task"], self.metrics["seed"]
            name = self.metrics.get("contender", self.entry.base)
            words = f'--data data --models checkpoints/{self.entry.base} --contenders "{name}" --tasks {task}'
            words += f" --seeds {seed}" + (" --bf16" if self.metrics.get("precision") == "bfloat16" else "")
            run = f"outputs/minilm-finetune/{task}/{name.replace(', ', '-').replace(' ', '-')}/seed-{seed}"
            commands = [self.entry.command] if self.entry.command else []
            commands.append(f"python experiments/minilm_finetune.py run {words}")
            return "\n".join([*commands, f"python model_cards/ship.py {self.name} {run}"])
        count = len(self.checkpoint.stages)
        for number, stage in enumerate(self.checkpoint.stages, 1):
            if stage.recipe:
                place = folder if number == count else f"{folder}/stages/{number}"
                commands.append(f"python {stage.script} {place}/recipe.yaml")
        outputs = " ".join(stage.recipe["output_dir"] for stage in self.checkpoint.stages if stage.recipe)
        commands = [self.entry.command] if self.entry.command else commands
        return "\n".join([*commands, f"python model_cards/ship.py {self.name} {outputs}"])


def _spread(values: list[float], most: int) -> str:
    """Their mean and standard deviation, and how many they are if not `most`."""
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}" + (f" ({len(values)})" if len(values) < most else "")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 1 if `--check` finds a stale card."""

    def script() -> None:
        options, zoo = parse(sys.argv[1:] if words is None else words), Zoo()
        names = options.names or list(zoo.checkpoints)
        found = []
        for name in names:
            with named(f"{zoo.root / 'checkpoints' / name}, or its entry in model_cards/zoo.yaml or the results,"):
                if not options.check:
                    write(zoo, name)
                elif is_stale(zoo, name):
                    found.append(name)
        with named(f"{zoo.root / 'checkpoints'}, or an entry in model_cards/zoo.yaml,"):
            table = index.text(Card(zoo, name) for name in zoo.entries if name in zoo.checkpoints)
        if not options.check:
            write_text(index.path(zoo), table)
        elif not index.path(zoo).is_file() or index.path(zoo).read_text(encoding="utf-8") != table:
            found.append("checkpoints/README.md")
        if found:
            raise UserError(f"Stale: {', '.join(found)}. Run: python model_cards/build.py")

    return run_script(script)


if __name__ == "__main__":
    sys.exit(main())
