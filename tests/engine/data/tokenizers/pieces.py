"""Tokenizers of pieces of characters: SentencePiece models that are trained here, and tokenizer.json files made of them.

made(case, folder, texts) writes a tokenizer, trained on the texts, and returns it as the packages have it.
`pieces.py FOLDER` writes small ones and the ids that the packages give: made/ was written so with sentencepiece 0.2.3 and
tokenizers 0.23.3."""
import base64
import io
import json
import math
import os
import re
import sys

from tokenizers import Tokenizer

BLANK = "\u2581"
SPECIAL = ["<|end|>", "<|endoftext|>"]
# Options of sentencepiece's trainer, by the name of a case.
TRAINED = {
    "spm-bpe": dict(model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
                    remove_extra_whitespaces=False, user_defined_symbols=["<sep>", "\n\n", BLANK * 2]),
    "spm-bpe-unknown": dict(model_type="bpe", character_coverage=0.98),
    "spm-unigram": dict(model_type="unigram", character_coverage=0.98, user_defined_symbols=["<sep>"]),
    "spm-unigram-bytes": dict(model_type="unigram", byte_fallback=True, add_dummy_prefix=False,
                              remove_extra_whitespaces=False),
}
# tokenizer.json: the model it is made of, normalizer, pre-tokenizer, decoder. "Precompiled" gets the model's own table.
METASPACE = {"type": "Metaspace", "replacement": BLANK, "prepend_scheme": "always", "split": True}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
BLANKS = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": BLANK}
DECODER = {"type": "Sequence", "decoders": [
    {"type": "Replace", "pattern": {"String": BLANK}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}


def sequence(kind, parts):
    return {"type": "Sequence", kind: parts}


MADE = {
    "llama2": ("spm-bpe", sequence("normalizers", [{"type": "Prepend", "prepend": BLANK}, REPLACE]), None, DECODER),
    "mixtral": ("spm-bpe", None, {**METASPACE, "prepend_scheme": "first", "split": False}, DECODER),
    "gemma": ("spm-bpe", REPLACE, {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                                   "invert": False}, DECODER),
    "pairs-unknown": ("spm-bpe-unknown", None, METASPACE, METASPACE),
    "albert": ("spm-unigram", sequence("normalizers", [{"type": "Precompiled"}, {"type": "Strip", "strip_left": True,
                                                                             "strip_right": True}, BLANKS]),
               METASPACE, METASPACE),
    "xlm-r": ("spm-unigram", {"type": "Precompiled"}, sequence("pretokenizers", [{"type": "WhitespaceSplit"}, METASPACE]),
              METASPACE),
    "unigram-bytes": ("spm-unigram-bytes", {"type": "Precompiled"}, {**METASPACE, "prepend_scheme": "never"}, METASPACE),
}
CASES = [*TRAINED, *MADE]


class Theirs:
    """A tokenizer of the package `tokenizers`: its file, and the ids of a text."""
    only_short = False
    equally_likely = None

    def __init__(self, path, tokenizer):
        self.path, self.tokenizer = path, tokenizer

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids


class Model:
    """A SentencePiece model. What lies between tokens that the library does not find in text is a text of its own."""

    def __init__(self, path, model, unigram):
        import sentencepiece
        self.path, self.unigram = path, unigram
        # The library adds up a text's scores as 32-bit floats, in which long texts' unequal ones are equal.
        self.only_short = unigram
        self.equally_likely = self.same_score if unigram else None
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.special = {self.processor.id_to_piece(i): i for i in range(self.processor.get_piece_size())
                        if self.processor.is_control(i) or self.processor.is_unknown(i)}
        self.parts = re.compile("(" + "|".join(re.escape(text) for text in
                                               sorted(self.special, key=len, reverse=True)) + ")")

    def encode(self, text):
        ids = []
        for part in self.parts.split(text):
            ids += [self.special[part]] if part in self.special else self.processor.encode(part) if part else []
        return ids

    def same_score(self, ids, others):
        def pieces(of):
            return "".join(self.processor.id_to_piece(one) for one in of)

        def score(of):
            return math.fsum(self.processor.get_score(one) for one in of)
        return pieces(ids) == pieces(others) and score(ids) > score(others) - 1e-9


def trained(case, folder, texts):
    import sentencepiece
    path = os.path.join(folder, case + ".model")
    options = {"vocab_size": 1200, "character_coverage": 0.995, "control_symbols": SPECIAL, "max_sentence_length": 100000,
               "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2, **TRAINED[case]}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, **options)
    with open(path, "wb") as out:
        out.write(model.getvalue())
    return Model(path, model.getvalue(), options["model_type"] == "unigram")


def fields(data):
    """Numbers and values of a protobuf message's fields."""
    at = 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
    while at < len(data):
        tag = number()
        if tag & 7 == 0:
            yield tag >> 3, number()
        else:
            size = number() if tag & 7 == 2 else 4 if tag & 7 == 5 else 8
            yield tag >> 3, data[at:at + size]
            at += size


def charsmap(path):
    with open(path, "rb") as file:
        normalizer = dict(fields(file.read()))[3]
    return base64.b64encode(dict(fields(normalizer)).get(2, b"")).decode()


def with_table(step, table):
    if isinstance(step, list):
        return [with_table(part, table) for part in step]
    if isinstance(step, dict):
        more = {"precompiled_charsmap": table} if step.get("type") == "Precompiled" else {}
        return {key: with_table(value, table) for key, value in step.items()} | more
    return step


def model_of(processor, unigram, byte_fallback):
    pieces = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]
    if unigram:
        return {"type": "Unigram", "unk_id": processor.unk_id(), "vocab": [[p, s] for p, s in pieces],
                "byte_fallback": byte_fallback}
    vocab = {piece: i for i, (piece, _) in enumerate(pieces)}
    merges = []
    for i, (piece, score) in enumerate(pieces):
        if processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i):
            continue
        merges += [(-score, i, n, [piece[:n], piece[n:]]) for n in range(1, len(piece))
                   if piece[:n] in vocab and piece[n:] in vocab]
    return {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": byte_fallback, "ignore_merges": False,
            "vocab": vocab, "merges": [merge[-1] for merge in sorted(merges, key=lambda m: m[:3])]}


def made(case, folder, texts):
    if case in TRAINED:
        return trained(case, folder, texts)
    source, normalizer, pre_tokenizer, decoder = MADE[case]
    model = trained(source, folder, texts)
    processor, options = model.processor, TRAINED[source]
    special = [i for i in range(processor.get_piece_size()) if processor.is_control(i) or processor.is_unknown(i)]
    whole = {"version": "1.0", "truncation": None, "padding": None, "post_processor": None,
             "added_tokens": [{"id": i, "content": processor.id_to_piece(i), "single_word": False, "lstrip": False,
                               "rstrip": False, "normalized": False, "special": True} for i in special],
             "normalizer": with_table(normalizer, charsmap(model.path)), "pre_tokenizer": pre_tokenizer, "decoder": decoder,
             "model": model_of(processor, model.unigram, options.get("byte_fallback", False))}
    out = os.path.join(folder, "tokenizer.json")
    with open(out, "w", encoding="utf-8") as file:
        json.dump(whole, file, ensure_ascii=False)
    return Theirs(out, Tokenizer.from_file(out))


def write_small(folder):
    """Small models with few rules of normalization, and the ids of texts by them."""
    from compare import HOSTILE, made_up
    texts = [made_up(seed, 20).replace("\n", " ") for seed in range(60)]
    rules = os.path.join(folder, "rules.tsv")
    with open(rules, "w", encoding="utf-8") as out:  # full-width A and a ligature, composed letters, breaks to a blank
        out.write("FF21\t41\nFB01\t66 69\n65 301\tE9\n61 308\tE4\n9\t20\nA\t20\nD\t20\nD A\t20\n3000\t20\n200B\t\n")
    for options in TRAINED.values():
        options.update(vocab_size=500, character_coverage=0.98)
        if "normalization_rule_name" not in options:
            options["normalization_rule_tsv"] = rules
    lines = []
    for case in CASES:
        theirs = made(case, folder, texts)
        name = os.path.basename(theirs.path)
        if case in MADE:
            name = case + ".json"
            os.rename(theirs.path, os.path.join(folder, name))
        cases = [[text, theirs.encode(text)] for text in [one[:60] for one in HOSTILE] + [made_up(2000 + i, 8) for i in range(12)]]
        lines.append(f"{json.dumps(name)}: {json.dumps(cases)}")
    os.remove(rules)
    with open(os.path.join(folder, "ids.json"), "w", encoding="utf-8") as out:
        out.write("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    write_small(sys.argv[1])
