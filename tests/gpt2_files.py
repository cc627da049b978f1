"""GPT-2's BPE and RoBERTa's dictionary as the files that fairseq and transformers read, and texts to tokenize."""

import gzip
import json
import random
import unicodedata
from pathlib import Path

FILES = Path(__file__).resolve().parent / "fixtures" / "gpt2_bpe"


def merge_lines(merges: int | None = None) -> list[str]:
    """The lines of GPT-2's merges.txt after its version, or the first of them."""
    lines = gzip.decompress((FILES / "merges.txt.gz").read_bytes()).decode().split("\n")
    return [line for line in lines[1:] if line][:merges]


def roberta_symbols() -> list[str]:
    """The symbols of RoBERTa's dict.txt, line by line."""
    return gzip.decompress((FILES / "dict.txt.gz").read_bytes()).decode().split()


def gpt2_folder(folder: Path, merges: int | None = None) -> Path:
    """Write vocab.json and merges.txt of GPT-2, or of a BPE with its first merges; creates the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = merge_lines(merges)
    printable = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174]
    others = [chr(256 + place) for place in range(256 - len(printable))]
    tokens = [*map(chr, printable), *others, *(line.replace(" ", "") for line in lines), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines, ""]), encoding="utf-8")
    return folder


def small_gpt2_folder(folder: Path) -> Path:
    """GPT-2's first 400 merges, enough for the dictionaries of `luna_fairseq_checkpoint`."""
    return gpt2_folder(folder, merges=400)


def roberta_dictionary(path: Path) -> Path:
    """Write RoBERTa's dict.txt with counts of 0."""
    path.write_text("".join(f"{symbol} 0\n" for symbol in roberta_symbols()))
    return path


# Many scripts, and everything that is hard to tokenize.
TEXTS = [
    "",
    " ",
    "\n",
    "Hello world",
    " Hello world",
    "Hello world ",
    "a  b   c    d     ",
    "tabs\tand\t\ttabs\nnew lines\n\n\nand\r\nCRLF\r\n \r\n",
    "vertical\x0btab, form\x0cfeed, \x1c\x1d\x1e\x1f separators, next\x85line",
    "control \x00\x01\x02\x07\x08\x1b[31m \x7f\x80\x9f",
    "no-break\xa0space, thin\u2009space, ideographic\u3000space, line\u2028paragraph\u2029ends",
    "zero\u200bwidth\u200cnon\u200djoiner, word\u2060joiner, soft\xadhyphen, BOM \ufeff and \u180e",
    "I'm, you're, he's, we've, she'll, they'd, don't, I'M, DON'T, 'tis, rock'n'roll, it''s, ''s, 'SS",
    "0 1 12 123 1234 12345678901234567890 1,234.56 -7 1e-5 0x1F 50% ½ ² ⅷ ٣ ४ 五",
    "https://example.org/a/b_c?d=e&f=%20#g user.name+tag@mail.example.co.uk C:\\dir\\file.txt ../..",
    "def f(x):\n\treturn {x: [y**2 for y in x if y != 0]}  # comment\n",
    "naïve café résumé Ångström façade coöperate Čeština żółć \u017ftraße İstanbul ﬁnger",
    "nai\u0308ve cafe\u0301 Z\u0351\u036b\u0343\u036aa\u0302\u0308lgo",
    "Русский текст, Ελληνικά κείμενα, Հայերեն, ქართული",
    "中文文本\uff0c日本語のテキスト。한국어 텍스트 ㄅㄆㄇ",
    "עברית שָׁלוֹם العربية مُحَمَّد فارسی اردو",
    "हिन्दी देवनागरी বাংলা தமிழ் తెలుగు ไทย ລາວ မြန်မာ ខ្មែរ አማርኛ ᏣᎳᎩ",
    "😀 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 1️⃣ ❤️ \U0001d518\U0001d52b\U0001d526 𐍈 𠜎",
    "“quotes” \u2018single\u2019 «guillemets» \u2013 — … • ™ © ® § ¶ † € £ ¥ ₿ ∑∫√∞≠≤ →⇒ ░▒▓",
    "a" * 300,
    "pneumonoultramicroscopicsilicovolcanoconiosis" * 6,
    "AbCdEf" * 40 + "!?" * 60 + " " * 80 + "x",
    "<|endoftext|> < s > <s > madeupword0000 </ s> &lt;mask&gt;",
    "\ufffd\ufffe\uffff\U0010ffff",
]

# With masks, which absorb the spaces before them.
MASKED = [
    *("Hello <mask> world", "Hello<mask>", "Hello   <mask>", "<mask>", "  <mask>", "<mask><mask>", "a <mask> <mask>b"),
    *("The <mask> of France\n<mask>, is\t <mask>.", "The capital\xa0\u3000<mask> is", "x\u200b <mask>  y"),
    "\n\n<mask>",
]


def random_texts() -> list[str]:
    """Random bytes as UTF-8, random characters, and random words; the same in every run."""
    generator = random.Random(0)
    # Libraries disagree on characters newer than Unicode 3.2.
    old = [chr(c) for c in range(0x110000) if unicodedata.ucd_3_2_0.category(chr(c)) not in ("Cn", "Cs")]
    blanks = [" ", "  ", "\n", "\t", "\r\n", "\xa0", " \u3000", "\u200b"]
    texts = []
    for _ in range(60):
        texts.append(generator.randbytes(generator.randrange(60)).decode("utf-8", errors="replace"))
        texts.append("".join(generator.choices(old, k=generator.randrange(40))))
        words = ["".join(generator.choices(old[:600], k=generator.randrange(1, 8))) for _ in range(10)]
        texts.append("".join(word + generator.choice(blanks) for word in words))
    return texts
