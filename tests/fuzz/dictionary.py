"""Writes libFuzzer's dictionary of the words that seeds hold: dictionary.py FOLDER.. > NAME.dict"""
import pathlib
import re
import sys

MOST_WORDS = 2000
WORD = re.compile(rb"--[\w-]+|[A-Za-z_][\w.-]{2,40}|\d+(?:\.\d+)?(?:e[+-]?\d+)?|[{}\[\]:,=|\"'\\]+")


def words_of(folders):
    """The words of all seeds, each once, in order."""
    files = sorted(file for folder in folders for file in pathlib.Path(folder).iterdir() if file.is_file())
    return list(dict.fromkeys(word for file in files for word in WORD.findall(file.read_bytes())))


def entry(word):
    """One word in libFuzzer's spelling (https://llvm.org/docs/LibFuzzer.html#dictionaries)."""
    return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\x{b:02x}" for b in word) + '"'


if __name__ == "__main__":
    for word in words_of(sys.argv[1:])[:MOST_WORDS]:
        print(entry(word))
