#!/usr/bin/env python3
"""Ids of `moe-plan tokenize` against Hugging Face's `tokenizers`, for the pre-tokenizers of the models that train here.

compare.py MOE_PLAN [CASE..]: trains a small byte-level BPE per case on made-up text of many scripts, writes its
tokenizer.json and compares the ids of a text full of corner cases, long enough for several blocks. So it does with tokenizers of pieces
(pieces.py) where the package sentencepiece is, on many short documents besides. Exits 77 (skipped) without `tokenizers`."""
import importlib.util
import itertools
import os
import random
import struct
import subprocess
import sys
import tempfile

try:
    import tokenizers
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
except ImportError as error:
    print(f"skipped: {error}; pip install tokenizers to run this test")
    sys.exit(77)  # Meson's exit status for a skipped test

import pieces

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLITS = {
    "llama3": [f"{CONTRACTIONS}|{LETTERS}|\\p{{N}}{{1,3}}|{REST}"],
    "qwen": [f"{CONTRACTIONS}|{LETTERS}|\\p{{N}}|{REST}"],
    "deepseek3": [r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+",
                  r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                  r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "gpt-oss": [r"[^\r\n\p{L}\p{N}]?" + UPPER + "*" + LOWER + "+" + ENDING + r"|[^\r\n\p{L}\p{N}]?" + UPPER + "+" +
                LOWER + "*" + ENDING + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
}
BYTE_LEVEL = ["gpt2", *SPLITS, "digits", "ignore-merges"]

ALPHABETS = ["abcdefghijklmnopqrstuvwxyz", "ABCXYZ", "0123456789", "éüßøñçÅ", "абвгдежзиЯ", "αβγδεΩ", "日本語中文字漢", "ひらがな",
             "カタカナ", "한국어말", "हिन्दीकी", "العربية", "ไทยภาษา", "😀👩‍👩‍👧🇩🇪", "①Ⅷ½²", "_-+*/=<>|#@!?.,;:'\"()[]{}", "e\u0301a\u0308o\u0302",
             "\u1100\u1161\u11a8", "ǅǲ", "\u00ad\u200b\ufeff"]
SPACES = [" ", "  ", "\n", "\r\n", "\t", "\n\n  ", "\u00a0", "\u3000", "\u2028", "\x0b", "\x0c", "\x85", "\x1c"]


def made_up(seed, words):
    draw = random.Random(seed)
    parts = []
    for _ in range(words):
        alphabet = draw.choice(ALPHABETS)
        parts.append("".join(draw.choice(alphabet) for _ in range(draw.randint(1, 9))))
        if draw.random() < 0.15:
            parts.append(draw.choice(["'s", "'RE", "'ll", "'D", "\u2019s", "<|end|>", "<|endoftext|>", "\x00"]))
        parts.append(draw.choice(SPACES) if draw.random() < 0.4 else " " if draw.random() < 0.8 else "")
    return "".join(parts)


def tokenizer(case):
    made = Tokenizer(models.BPE(ignore_merges=case == "ignore-merges"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=case in ("gpt2", "digits"))
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in
             SPLITS.get("llama3" if case == "ignore-merges" else case, [])]
    if case == "digits":
        steps = [pre_tokenizers.Digits(individual_digits=True)]
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level]) if steps else byte_level
    made.normalizer = normalizers.NFC() if case == "qwen" else None
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1500 if case != "llama3" else 70000, show_progress=False,
                                  special_tokens=["<|end|>", "<|endoftext|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    texts = [made_up(seed, 400) for seed in range(40)]
    if case == "llama3":  # more ids than 16 bits hold
        draw = random.Random(1)
        texts += [" ".join("".join(draw.choice("bcdfghjklmnpqrstvwxz") for _ in range(12)) for _ in range(15000))]
    made.train_from_iterator(texts, trainer)
    return made


def ids_of(prefix):
    with open(prefix + ".idx", "rb") as file:
        head = file.read(34)
    code = struct.unpack("<B", head[17:18])[0]
    width, kind = {8: (2, "H"), 4: (4, "i")}[code]
    with open(prefix + ".bin", "rb") as file:
        data = file.read()
    with open(prefix + ".idx", "rb") as file:
        count, = struct.unpack("<Q", file.read(26)[18:])
        file.read(8)
        lengths = struct.unpack(f"<{count}i", file.read(4 * count))
    flat, ends = struct.unpack(f"<{len(data) // width}{kind}", data), list(itertools.accumulate(lengths))
    return [list(flat[end - length:end]) for length, end in zip(lengths, ends)], width


# Short documents that break readers.
HOSTILE = ["", " ", "  a", "a  ", "\n", "\n\n\n", "\t\r\n x", "\x00", "a\x00b", "\x01\x02\x7f\x80\x9f", "\ufeffa", "\u200bx\u200d",
           "<s>", "a</s>b", "<unk><unk>", "<|end|> <|end|>", "<|end|>a <|endoftext|>", "<0x0A>", "<sep>a<sep> b", "a <sep>",
           "\u2581", " \u2581 a\u2581b", "\ufdfa", "\ufb01 \u00bd \u2460 \u212b", "e\u0301 A\u030a\u0301 \u0600a", "\r", "a\r\nb", "\u3000a\u3000",
           "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea\U0001f1eb", "\U0010ffff\ufffe", "\u0e01\u0e33", "\u0915\u094d\u0937",
           "a" * 5000, "\u65e5" * 3000, " " * 3000 + "x", "\u0301" * 50]


def ours(moe_plan, texts, vocab, work):
    files = []
    for i, text in enumerate(texts):
        files.append(os.path.join(work, f"text{i}"))
        with open(files[-1], "w", encoding="utf-8", newline="") as out:
            out.write(text)
    prefix = os.path.join(work, "out")
    done = subprocess.run([moe_plan, "tokenize", *files, "--vocab", vocab, "--out", prefix], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    return ids_of(prefix)


def compared(name, moe_plan, texts, vocab, theirs, work):
    got, width = ours(moe_plan, texts, vocab, work)
    wrong = likely = 0
    for text, ids in zip(texts, got):
        expected = theirs.encode(text)
        if ids == expected:
            continue
        if theirs.equally_likely and theirs.equally_likely(ids, expected):
            likely += 1
            continue
        wrong += 1
        if wrong == 1:
            at = next((i for i, (a, b) in enumerate(zip(ids, expected)) if a != b), min(len(ids), len(expected)))
            print(f"  {text[:200]!r}, from id {at}: {ids[at:at + 8]} against {expected[at:at + 8]}")
    good = wrong == 0 and len(got) == len(texts)
    print(f"{name:20} {sum(map(len, got))} ids of {len(got)} documents, {width} bytes each: {'agree' if good else 'WRONG'}" +
          (f"; {likely} documents are other, equally likely sequences" if likely else ""))
    return good


def run_case(moe_plan, case, work):
    text = made_up(99, 6000) + "a" * 3000 + " " * 500
    long = text * (1 + (3 << 20) // len(text.encode()))
    if case in BYTE_LEVEL:
        theirs = tokenizer(case)
        vocab = os.path.join(work, "tokenizer.json")
        theirs.save(vocab)
        return compared(case, moe_plan, [long], vocab, pieces.Theirs(vocab, theirs), work)
    theirs = pieces.made(case, work, [made_up(seed, 60).replace("\n", " ") for seed in range(300)])
    short = [one for one in HOSTILE if one] + [made_up(1000 + i, 12) or "a" for i in range(400)]
    good = compared(case, moe_plan, short, theirs.path, theirs, work)
    return (theirs.only_short or compared(case + " (long)", moe_plan, [long], theirs.path, theirs, work)) and good


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    moe_plan, chosen = os.path.abspath(sys.argv[1]), sys.argv[2:] or list(BYTE_LEVEL)
    print(f"tokenizers {tokenizers.__version__}")
    if len(sys.argv) == 2 and importlib.util.find_spec("sentencepiece"):
        chosen += pieces.CASES
    elif len(sys.argv) == 2:
        print("without tokenizers of pieces: pip install sentencepiece to compare them")
    failed = []
    for case in chosen:
        with tempfile.TemporaryDirectory() as work:
            if not run_case(moe_plan, case, work):
                failed.append(case)
    sys.exit(f"not: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
