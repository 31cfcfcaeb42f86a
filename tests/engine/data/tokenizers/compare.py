#!/usr/bin/env python3
"""Ids of `moe-plan tokenize` against Hugging Face's `tokenizers`, for the pre-tokenizers of the models that train here.

compare.py MOE_PLAN [CASE..]: trains a small byte-level BPE per case on made-up text of many scripts, writes its
tokenizer.json and compares the ids of a text full of corner cases, long enough for several blocks. Exits 77 (skipped) without the package."""
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
CASES = ["gpt2", *SPLITS, "digits", "ignore-merges"]

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
    return list(struct.unpack(f"<{len(data) // width}{kind}", data)), width


def run_case(moe_plan, case, work):
    theirs = tokenizer(case)
    text = made_up(99, 6000) + "a" * 3000 + " " * 500
    text *= 1 + (3 << 20) // len(text.encode())
    file, vocab, prefix = (os.path.join(work, name) for name in ("text.txt", "tokenizer.json", "out"))
    theirs.save(vocab)
    with open(file, "w", encoding="utf-8", newline="") as out:
        out.write(text)
    done = subprocess.run([moe_plan, "tokenize", file, "--vocab", vocab, "--out", prefix], capture_output=True, text=True)
    if done.returncode != 0:
        print(f"{case}: WRONG {done.stderr.strip()}")
        return False
    ours, width = ids_of(prefix)
    expected = theirs.encode(text, add_special_tokens=False).ids
    good = ours == expected
    print(f"{case:14} {len(expected)} ids of {theirs.get_vocab_size()}, {width} bytes each: {'agree' if good else 'WRONG'}")
    if not good:
        at = next((i for i, (a, b) in enumerate(zip(ours, expected)) if a != b), min(len(ours), len(expected)))
        print(f"  from id {at} of {len(ours)}: {ours[at:at + 6]} against {expected[at:at + 6]}: "
              f"{theirs.decode(expected[max(0, at - 3):at + 6], skip_special_tokens=False)!r}")
    return good


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    moe_plan, chosen = os.path.abspath(sys.argv[1]), sys.argv[2:] or CASES
    print(f"tokenizers {tokenizers.__version__}")
    failed = []
    for case in chosen:
        with tempfile.TemporaryDirectory() as work:
            if not run_case(moe_plan, case, work):
                failed.append(case)
    sys.exit(f"not: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
